"""TensorBoard's event files, without TensorBoard: scalars by step.

A file is a row of records: length (8 bytes, little-endian), its checksum (4), the bytes
of an `Event`, their checksum (4). Of the protocol buffers only what holds scalars is
read: Event {2: step, 5: Summary {1: Value {1: tag, 2: simple_value, 8: Tensor}}}, where
Tensor is {1: type, 4: content, 5: float_val, 6: double_val}.
"""

import struct
from collections.abc import Iterator
from typing import Any

from optimizer.training.logs import LogError, Row

HEADER = 12  # a length and its checksum
MAX_RECORD = 64 << 20
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
FLOAT, DOUBLE = 1, 2  # types of tensors
Field = tuple[int, int | bytes]


def looks_like_events(content: bytes) -> bool:
    """Whether the first record is one that TensorBoard writes at the start of a file."""
    if len(content) < HEADER or content[:1] in (b"{", b"["):
        return False
    (length,) = struct.unpack_from("<Q", content)
    return 0 < length < 4096 and b"brain.Event:" in content[HEADER : HEADER + length]


def event_rows(content: bytes) -> tuple[list[Row], list[str]]:
    """Return a row for each step and tag, and notes. Raises LogError without scalars."""
    rows: list[Row] = []
    notes: list[str] = []
    for record in _records(content, notes):
        rows += _scalars(record)
    if not rows:
        raise LogError("the event file has no scalars")
    by_step: dict[int, dict[str, Any]] = {}
    for row in rows:
        by_step.setdefault(row["step"], {}).update(row)
    return list(by_step.values()), notes


def _records(content: bytes, notes: list[str]) -> Iterator[bytes]:
    at = count = 0
    while at < len(content):
        if at + HEADER > len(content):
            break
        (length,) = struct.unpack_from("<Q", content, at)
        end = at + HEADER + length + 4
        if length > MAX_RECORD or end > len(content):
            break
        yield content[at + HEADER : end - 4]
        at, count = end, count + 1
    if at < len(content):
        notes.append(f"the event file is cut after {count} records")


def _scalars(record: bytes) -> list[Row]:
    event = dict(_fields(record))
    summary, step = event.get(5), event.get(2, 0)
    if not isinstance(summary, bytes):
        return []
    rows: list[Row] = []
    for number, value in _fields(summary):
        if number == 1 and isinstance(value, bytes):
            parts = dict(_fields(value))
            scalar = _scalar(parts)
            if scalar is not None:
                rows.append({"step": step, _text(parts.get(1)): scalar})
    return rows


def _scalar(parts: dict[int, int | bytes]) -> float | None:
    simple, tensor = parts.get(2), parts.get(8)
    if isinstance(simple, bytes):
        return float(struct.unpack("<f", simple)[0])
    if not isinstance(tensor, bytes):
        return None
    held = dict(_fields(tensor))
    kind = {FLOAT: "<f", DOUBLE: "<d"}.get(int(held.get(1, 0)))
    value = held.get(4) or held.get(5) or held.get(6)
    if (
        kind is None
        or not isinstance(value, bytes)
        or len(value) != struct.calcsize(kind)
    ):
        return None
    return float(struct.unpack(kind, value)[0])


def _text(value: int | bytes | None) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""


def _fields(message: bytes) -> Iterator[Field]:
    """Yield (number, value) of a message; fixed-width values as their bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire == BYTES:
            size, at = _varint(message, at)
        elif wire in (FIXED64, FIXED32):
            size = 8 if wire == FIXED64 else 4
        else:
            return
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 or shift > 63:
            break
        shift += 7
    return value, at
