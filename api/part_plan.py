"""How the bytes of an upload are cut into parts: the service says, not the client.

Parts are numbered from 1 through all files in their order; a part lies in one file,
and all but the last of a file have the same size.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Files = Sequence[Mapping[str, Any]]  # {path, bytes}


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes `offset` to `offset + bytes` of one file."""

    number: int
    path: str
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file and the numbers of its parts."""

    path: str
    bytes: int
    first_part: int
    parts: int


def files(planned: Files, part_bytes: int) -> list[PlannedFile]:
    """Return every file with its parts."""
    found, first = [], 1
    for file in planned:
        parts = -(-file["bytes"] // part_bytes)
        found.append(PlannedFile(file["path"], file["bytes"], first, parts))
        first += parts
    return found


def count(planned: Files, part_bytes: int) -> int:
    """Return how many parts there are."""
    return sum(file.parts for file in files(planned, part_bytes))


def parts(planned: Files, part_bytes: int) -> Iterable[Part]:
    """Yield every part in order."""
    for file in files(planned, part_bytes):
        for index in range(file.parts):
            offset = index * part_bytes
            size = min(part_bytes, file.bytes - offset)
            yield Part(file.first_part + index, file.path, offset, size)


def part(planned: Files, part_bytes: int, number: int) -> Part | None:
    """Return the part of this number. None: there is none."""
    for file in files(planned, part_bytes):
        index = number - file.first_part
        if 0 <= index < file.parts:
            offset = index * part_bytes
            size = min(part_bytes, file.bytes - offset)
            return Part(number, file.path, offset, size)
    return None
