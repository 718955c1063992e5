"""How much memory this process may take: a share of what is free, or as little as will do.

It decides where weights and activations lie while a job runs, never what comes out.
"""

from dataclasses import dataclass

import psutil

RESIDENT_SHARE = 0.4  # of the memory at hand, for weights: a larger model is streamed
ACTIVATIONS_BYTES = 1 << 30  # of hidden states in memory; what is more lies in a file
SPARING_BYTES = 1 << 26  # of them where memory ran out before


@dataclass(slots=True)
class _Allowed:
    limit_bytes: int = 0  # of the process; 0: the machine's memory
    sparing: bool = False  # memory ran out once


_allowed = _Allowed()


def use(limit_bytes: int = 0, *, sparing: bool = False) -> None:
    """Set what this process may take. `sparing`: weights are always streamed."""
    _allowed.limit_bytes, _allowed.sparing = limit_bytes, sparing


def resident_bytes() -> int:
    """Return how many bytes of weights may stay in memory."""
    if _allowed.sparing:
        return 0
    free = int(psutil.virtual_memory().available)
    return int(RESIDENT_SHARE * min(free, _allowed.limit_bytes or free))


def activations_bytes() -> int:
    """Return how many bytes of hidden states may stay in memory, of one pass."""
    return SPARING_BYTES if _allowed.sparing else ACTIVATIONS_BYTES
