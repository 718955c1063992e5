"""How much of a text repeats what it said before: n-grams, and a loop at its end.

A model that was narrowed too far starts to loop after some fifty tokens; perplexity,
which feeds it the true text at every step, does not show that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

NGRAM = 4
ROUNDS = 3  # of a cycle: said three times, it is a loop
LEAST = 12  # tokens of a loop: three equal tokens are an ellipsis


@dataclass(frozen=True, slots=True)
class Loop:
    """From token `start` on, the text is one cycle of `period` tokens, to its end."""

    start: int
    period: int


def repeated(ids: Sequence[int], n: int = NGRAM) -> float:
    """Return the share of the n-grams that the text has had before; 0 of a short one.

    Example: repeated([1, 2, 1, 2, 1], 2) == 0.5: of 12 21 12 21, two are new
    """
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def loop(ids: Sequence[int]) -> Loop | None:
    """Return the loop that the text ends in, the longest. None: it ends in none.

    Example: loop([7, 1, 2, 1, 2, …]) == Loop(start=1, period=2)
    """
    found = [
        Loop(start, period)
        for period in range(1, len(ids) // ROUNDS + 1)
        if len(ids) - (start := _start(ids, period)) >= max(ROUNDS * period, LEAST)
    ]
    return min(found, key=lambda one: (one.start, one.period), default=None)


def _start(ids: Sequence[int], period: int) -> int:
    """Return from where on each token is the one `period` before it."""
    at = len(ids) - period
    while at > 0 and ids[at - 1] == ids[at - 1 + period]:
        at -= 1
    return at
