"""`Prefer: respond-async, wait=N`, RFC 7240: how long a caller likes to wait."""

import re
from dataclasses import dataclass

MAX_WAIT_S = 60
TOKEN = r"[\w!#$%&'*+.^`|~-]+"
PIECE = re.compile(rf'\s*({TOKEN})\s*(?:=\s*"?([^",;]*)"?\s*)?(?:;.*)?', re.ASCII)


@dataclass(frozen=True, slots=True)
class Preference:
    """What was asked for, and is done."""

    wait_s: int = 0
    applied: str = ""  # the value of `Preference-Applied`; empty: nothing was


def read(header: str | None) -> Preference:
    """Return the preferences that we know; others are ignored, as the standard says."""
    said = _said(header or "")
    applied = []
    wait_s = 0
    if "respond-async" in said:
        applied.append("respond-async")
    if said.get("wait", "").isdigit():
        wait_s = min(int(said["wait"][:9]), MAX_WAIT_S)
        applied.append(f"wait={wait_s}")
    return Preference(wait_s, ", ".join(applied))


def _said(header: str) -> dict[str, str]:
    """Return names and values; the first of two equals counts."""
    found: dict[str, str] = {}
    for piece in header.split(","):
        if match := PIECE.fullmatch(piece):
            found.setdefault(match[1].lower(), (match[2] or "").strip())
    return found
