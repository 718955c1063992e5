"""Identifiers: a prefix that says what it is, and 26 characters that sort by time.

The 26 are a ULID in lower case: 48 bits of milliseconds, then 80 random bits.
"""

import hashlib
import secrets
import threading
import time

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford: no i, l, o, u
LENGTH = 26
NAME_PATTERN = r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}$"  # of what callers name
PATTERN = rf"[{ALPHABET}]{{{LENGTH}}}"
RANDOM = 80  # bits
STEP = 64  # bits of the step between two ids of one millisecond

_lock = threading.Lock()
_last = 0


def new(prefix: str) -> str:
    """Return e.g. `job_01jc…`: unique, and later ones of this process sort later."""
    global _last
    with _lock:
        now_ms = time.time_ns() // 1_000_000
        number = now_ms << RANDOM | secrets.randbits(RANDOM)
        # The same millisecond, or its ids have run into the next one.
        if now_ms <= _last >> RANDOM <= now_ms + 1:
            number = _last + 1 + secrets.randbits(STEP)
        _last = number
    return f"{prefix}_{_encode(number)}"


def of(prefix: str, text: str) -> str:
    """Return an id that is made of `text` alone: the same text, the same id."""
    bits = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")
    return f"{prefix}_{_encode(bits)}"


_PAIRS = [first + second for first in ALPHABET for second in ALPHABET]
_SHIFTS = range(5 * (LENGTH - 2), -1, -10)


def _encode(number: int) -> str:
    return "".join([_PAIRS[number >> shift & 1023] for shift in _SHIFTS])
