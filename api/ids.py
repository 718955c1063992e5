"""Identifiers: a prefix that says what it is, and 26 characters that sort by time.

The 26 are a ULID in lower case: 48 bits of milliseconds, then 80 random bits.
"""

import base64
import re
import secrets
import time

from api.errors import BadCursor

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford: no i, l, o, u
LENGTH = 26
PATTERN = rf"[{ALPHABET}]{{{LENGTH}}}"


def new(prefix: str) -> str:
    """Return e.g. `job_01jc…`: unique, and later ones sort later."""
    number = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    return f"{prefix}_{_encode(number)}"


def _encode(number: int) -> str:
    return "".join(ALPHABET[number >> 5 * i & 31] for i in reversed(range(LENGTH)))


def cursor(job_id: str) -> str:
    """Return an opaque place in a list of jobs."""
    return base64.urlsafe_b64encode(job_id.encode()).decode().rstrip("=")


def read_cursor(text: str) -> str:
    """Inverse of `cursor`. Raises BadCursor."""
    try:
        padded = text + "=" * (-len(text) % 4)
        job_id = base64.b64decode(padded, altchars=b"-_", validate=True).decode()
    except ValueError:
        job_id = ""
    if not re.fullmatch(f"job_{PATTERN}", job_id):
        raise BadCursor("'after' is not a cursor that this service gave out")
    return job_id
