"""Stacks that nobody predicted to be on the front, and that may be on it all the same.

A prediction has an error, so the true front also has stacks just above the predicted
one. They are sought around every measured point of the front: changes of one site, and
pairs of them. A neighbor's loss is the measured loss of its point times the predicted
ratio of the two, which forgets what the prediction gets wrong for both alike. Measured
are those that, with the error in their favor, lie farthest below the measured front.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from optimizer.choose import Chooser
from optimizer.repair import DOUBT, Move, Repair, moved, singles, stack_key
from optimizer.stack import Stack

PAIRED = 24  # changes of one site that are paired with each other, at most


@dataclass(frozen=True, slots=True, eq=False)
class _Hope:
    """A neighbor that was not measured, and how far below the front it may be."""

    stack: Stack
    margin: float  # log of the front's loss at its cost over its own; > 0 is below


def explore(state: Repair, count: int) -> list[Stack]:
    """Measure the `count` most promising neighbors of the front; return those measured.

    Fewer, or none, where no neighbor can be expected to be below the front.
    """
    hopes: dict[tuple[str, ...], _Hope] = {}
    for hope in _hopes(state):
        key = stack_key(hope.stack)
        if key not in hopes or hopes[key].margin < hope.margin:
            hopes[key] = hope
    best = sorted(hopes, key=lambda key: (-hopes[key].margin, key))
    return state.add(hopes[key].stack for key in best[:count])


def _hopes(state: Repair) -> Iterator[_Hope]:
    chooser = state.chooser
    doubt = chooser.surrogate.residual or DOUBT
    stacks = list(state.stacks.values())
    costs = np.array([_cost(chooser, s) for s in stacks]).reshape(-1, 2)
    losses = np.array([state.kl_nats(s) for s in stacks])
    for base in state.front():
        added = chooser.added(base).kl_nats
        whole = chooser.surrogate.whole
        scale = state.kl_nats(base) / whole(added) if whole(added) > 0 else 1.0
        seconds, size = _cost(chooser, base)
        for move in _near(list(singles(chooser, base))):
            loss = scale * whole(max(added + move.lost, 0.0))
            cost = seconds + move.seconds, size + move.bytes
            level = _level(costs, losses, cost)
            luckily = loss * (1 - min(doubt, 0.9))
            if 0.0 < luckily < level:
                stack = moved(chooser, base, move)
                if state.known(stack) is None:
                    margin = float(np.log(level / luckily))
                    yield _Hope(stack, margin)


def _near(moves: Sequence[Move]) -> Iterator[Move]:
    """Yield the moves, and the pairs of those that change the loss least."""
    yield from moves
    least = sorted(moves, key=lambda m: (abs(m.lost), m.picks))[:PAIRED]
    for one, other in combinations(least, 2):
        if one.picks[0][0] != other.picks[0][0]:
            yield one + other


def _level(
    costs: NDArray[np.float64], losses: NDArray[np.float64], cost: tuple[float, float]
) -> float:
    """Return the least measured loss at no more than a cost; inf: none is so cheap."""
    within = (costs <= cost).all(axis=1)
    return float(losses[within].min()) if within.any() else np.inf


def _cost(chooser: Chooser, stack: Stack) -> tuple[float, float]:
    totals = chooser.totals(stack)
    return totals.per_token_s, float(totals.memory_bytes)
