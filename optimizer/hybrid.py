"""Where an estimate is too uncertain for what hangs on it: pairs that deserve a run.

Stacks next to each other on the front differ in few sites: those decisions hang on
the figures of few pairs. A pair is measured alone if its estimate's own error is
large, and large beside what such a stack loses; every other estimate stands. The whole
front is looked at, so that all targets share what is measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from optimizer.stack import Choice, Site, Stack
from optimizer.sums import Sensitivities

MAX_PAIRS = 8  # measured at most, the most uncertain ones
DOUBT = 0.25  # a standard error of a quarter of the estimate
WEIGHT = 0.02  # and of 2 % of what the stack loses
NOTHING = 1e-12  # nats: what a stack loses at least


def doubtful(
    front: Sequence[Stack], losses: Sensitivities, max_pairs: int = MAX_PAIRS
) -> list[tuple[Site, Choice]]:
    """Return the pairs in which neighbors on a front differ that deserve an exact run.

    Those come first whose error is largest beside what a stack loses that hangs on
    it. Empty where every estimate is good enough for the decisions.
    """
    weights: dict[tuple[Site, Choice], float] = {}
    for one, other in pairwise(front):
        lost = max(_lost(one, losses), _lost(other, losses), NOTHING)
        for pair in one.choices.items() ^ other.choices.items():
            error = losses[pair].kl_nats_se
            if error > DOUBT * losses[pair].kl_nats and error > WEIGHT * lost:
                weights[pair] = max(weights.get(pair, 0.0), error / lost)
    found = sorted(weights, key=lambda p: (-weights[p], str(p[0]), p[1].name))
    return found[:max_pairs]


def _lost(stack: Stack, losses: Sensitivities) -> float:
    return sum(losses[pair].kl_nats for pair in stack.choices.items())


def settled(
    losses: Sensitivities, measured: Mapping[tuple[Site, Choice], float]
) -> Sensitivities:
    """Return the losses with the measured ones in place of their estimates."""
    better = {
        pair: replace(losses[pair], kl_nats=kl, kl_nats_se=0.0, exact=True)
        for pair, kl in measured.items()
    }
    return {**losses, **better}
