"""JSON that strangers wrote, parsed so that no two readers could read it differently.

The parts of a large object are parsed one by one, so that what a crafted one promises
is never held at once: a list of a million lists in the place of a shape costs nothing.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

METADATA = "__metadata__"
MAX_METADATA_BYTES = 1 << 20
MAX_METADATA_KEYS = 10_000

# The possessive `*+` gives nothing back: no input makes the search take long.
_SPACE = rb"[ \t\r\n]*+"
_STRING = rb'"(?:[^"\\]|\\.)*+"'
_NAME = re.compile(_SPACE + b"(" + _STRING + b")" + _SPACE + b":" + _SPACE)
_OBJECT_OF_STRINGS = re.compile(rb'\{(?:[^"{}]|' + _STRING + rb")*+\}")
_NEXT = re.compile(_SPACE + b"([,}])" + _SPACE)
_TENSOR = re.compile(_NAME.pattern + rb"(\{[^{}]{0,4096}\})" + _NEXT.pattern)
_EMPTY = re.compile(rb"\{" + _SPACE + rb"\}" + _SPACE)


def parse(content: bytes) -> dict[str, Any]:
    """Parse a JSON object in which no key comes twice. Raises ValueError."""
    try:
        value = _DECODER.decode(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Two readers may each take another of two equal keys: the classic smuggling."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {name[:80]!r} comes twice")
            seen.add(name)
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_distinct)


def entries(content: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the tensors of a safetensors header, each parsed alone.

    Whether a name comes twice is the caller's to see. Raises ValueError for everything
    but flat objects under names, and metadata of strings once.
    """
    if _EMPTY.fullmatch(content):
        return
    place, after, described = 1, b",", False
    while after == b",":
        name, value_at = _name(content, place)
        if name == METADATA:
            if described:
                raise ValueError(f"the key {METADATA!r} comes twice")
            described = True
            place, after = _past_metadata(content, value_at)
            continue
        tensor = _TENSOR.match(content, place)
        if tensor is None:
            raise ValueError(
                f"tensor {name[:80]!r} is not a flat JSON object of at most 4096 bytes"
            )
        yield name, parse(tensor[2])
        place, after = tensor.end(), tensor[3]
    if place != len(content):
        raise ValueError(f"something follows the end of the header at byte {place}")


def _name(content: bytes, start: int) -> tuple[str, int]:
    """Return the name at `start`, and where its value begins."""
    found = _NAME.match(content, start)
    if found is None:
        raise ValueError(f"not JSON: no name at byte {start} of the header")
    quoted = found[1].decode("utf-8")
    name = str(json.loads(quoted)) if "\\" in quoted else quoted[1:-1]
    return name, found.end()


def _past_metadata(content: bytes, start: int) -> tuple[int, bytes]:
    """Check the metadata that begin at `start`; return where they end, and on what."""
    found = _OBJECT_OF_STRINGS.match(content, start, start + MAX_METADATA_BYTES)
    after = found and _NEXT.match(content, found.end())
    if found is None or after is None:
        raise ValueError(
            f"{METADATA} may hold nothing but strings, {MAX_METADATA_BYTES} bytes in all"
        )
    metadata = parse(found[0])
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{METADATA} may hold nothing but strings")
    if len(metadata) > MAX_METADATA_KEYS:
        raise ValueError(
            f"{METADATA} has {len(metadata)} keys, the limit is {MAX_METADATA_KEYS}"
        )
    return after.end(), after[1]
