"""Identifiers: a prefix that says what it is, and 26 characters that sort by time.

The 26 are a ULID in lower case: 48 bits of milliseconds, then 80 random bits.
"""

import secrets
import time

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford: no i, l, o, u
LENGTH = 26
NAME_PATTERN = r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}$"  # of what callers name
PATTERN = rf"[{ALPHABET}]{{{LENGTH}}}"


def new(prefix: str) -> str:
    """Return e.g. `job_01jc…`: unique, and later ones sort later."""
    number = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    return f"{prefix}_{_encode(number)}"


def _encode(number: int) -> str:
    return "".join(ALPHABET[number >> 5 * i & 31] for i in reversed(range(LENGTH)))
