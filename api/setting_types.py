"""What settings may be, and how it is written in a variable."""

import os
import re
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode

MIB = 2**20
GIB = 2**30
DAY_S = 86_400.0
ENTITY = r"^([a-z]+:)?([a-z0-9-]{1,63}/)?[a-zA-Z0-9]([a-zA-Z0-9._-]{0,61}[a-zA-Z0-9])?$"
"""A reference to an entity of Backstage: `group:default/platform`, or less of it."""


def _split(value: object) -> object:
    if not isinstance(value, str):
        return value
    return [part for part in value.split(os.pathsep) if part]  # "" is not "here"


def _split_at_commas(value: object) -> object:
    if not isinstance(value, str):
        return value
    return [part for part in re.split(r"[\s,]+", value) if part]


def _host_or_network(value: str) -> str:
    if re.fullmatch(r"[a-z0-9.-]*[a-z][a-z0-9.-]*", value):
        return value
    try:
        return str(ip_network(value))
    except ValueError:
        raise ValueError(
            f"{value!r} is no host in lower case, no address and no network"
        ) from None


def _one_line(value: str) -> str:
    if not value.isprintable():  # a control character, or one that turns the text round
        raise ValueError("must be one line of plain text, without control characters")
    return value.strip()


Notice = Annotated[str, Field(max_length=500), AfterValidator(_one_line)]
PerMinute = Annotated[int, Field(ge=0, le=1_000_000)]
Seconds = Annotated[float, Field(gt=0, le=30 * DAY_S, allow_inf_nan=False)]
File = Annotated[Path | None, BeforeValidator(lambda value: value or None)]
Words = Annotated[list[str], NoDecode, BeforeValidator(_split_at_commas)]
Folders = Annotated[list[Path], NoDecode, BeforeValidator(_split)]
Hosts = Annotated[
    list[Annotated[str, AfterValidator(_host_or_network)]],
    NoDecode,
    BeforeValidator(_split_at_commas),
]
Origins = Annotated[
    list[Annotated[str, Field(pattern=r"^https?://[a-z0-9.-]+(:[0-9]{1,5})?$")]],
    NoDecode,
    BeforeValidator(_split_at_commas),
]
Repositories = Annotated[
    list[Annotated[str, Field(pattern=r"^[\w.*-]+/[\w.*-]+$")]],
    NoDecode,
    BeforeValidator(_split_at_commas),
]
Ports = Annotated[
    list[Annotated[int, Field(ge=1, le=65535)]],
    NoDecode,
    BeforeValidator(_split_at_commas),
]
