"""JSON that strangers wrote, parsed so that no two readers could read it differently."""

import json
from typing import Any


def parse(content: bytes) -> dict[str, Any]:
    """Parse a JSON object in which no key comes twice. Raises ValueError."""
    try:
        value = _DECODER.decode(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
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
