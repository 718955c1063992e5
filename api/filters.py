"""The query parameters that say which jobs a list has."""

import re
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BeforeValidator,
    TypeAdapter,
    ValidationError,
)

from api.errors import InvalidParameter
from api.models import Status
from api.owners import Filter
from api.schemas import Metadata

METADATA: dict[str, Any] = {  # `metadata[team]=ads`, as often as there are pairs
    "parameters": [
        {
            "name": "metadata",
            "in": "query",
            "style": "deepObject",
            "explode": True,
            "required": False,
            "description": "Pairs that the job's metadata has: `metadata[team]=ads`.",
            "schema": {"type": "object", "additionalProperties": {"type": "string"}},
        }
    ]
}
DATE = re.compile(r"\d{4}-\d\d-\d\d[Tt ]")
PAIRS: TypeAdapter[dict[str, str]] = TypeAdapter(Metadata)


def _utc(value: datetime) -> datetime:
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError("the year is out of range") from None


def _written(value: object) -> object:
    """Refuse a number: whether it is of seconds or of milliseconds, nobody knows."""
    if isinstance(value, str) and not DATE.match(value):
        raise ValueError("write it as 2026-11-01T12:00:00Z")
    return value


Moment = Annotated[AwareDatetime, BeforeValidator(_written), AfterValidator(_utc)]


def wanted(
    request: Request,
    status: Annotated[list[Status] | None, Query(max_length=8)] = None,
    hardware: Annotated[str | None, Query(max_length=128)] = None,
    created_after: Moment | None = None,
    created_before: Moment | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> Filter:
    """FastAPI dependency: the filter that a query says."""
    return Filter(
        statuses=tuple(status or ()),
        hardware=hardware,
        created_after=created_after,
        created_before=created_before,
        metadata=metadata(request),
        ascending=order == "asc",
    )


def metadata(request: Request) -> dict[str, str]:
    """Return a query's pairs of metadata.

    Raises InvalidParameter; the same key twice asks for two.
    """
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if not name.startswith("metadata["):
            continue
        key = name.removeprefix("metadata[").removesuffix("]")
        if found.setdefault(key, value) != value:
            raise InvalidParameter(name, "it is there twice, and nothing has both")
    try:
        return PAIRS.validate_python(found)
    except ValidationError as error:
        raise InvalidParameter("metadata", error.errors()[0]["msg"]) from None
