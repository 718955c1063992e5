"""Where an estimate is too uncertain for what hangs on it: pairs that deserve a run.

Stacks next to each other on the front differ in few sites: those decisions hang on
the figures of few pairs. A pair is measured alone if its estimate's own error is
large, and large beside what the stack loses; every other estimate stands.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from optimizer.stack import Choice, Site, Stack
from optimizer.sums import Sensitivities

MAX_PAIRS = 8  # measured at most, the most uncertain ones
DOUBT = 0.25  # a standard error of a quarter of the estimate
WEIGHT = 0.02  # and of 2 % of what the stack loses


def doubtful(
    stacks: Sequence[Stack], losses: Sensitivities, max_pairs: int = MAX_PAIRS
) -> list[tuple[Site, Choice]]:
    """Return the pairs in which the stacks differ that deserve an exact run.

    The most uncertain ones come first; `stacks` are neighbors, the one in question
    first. Empty where every estimate is good enough for the decision.
    """
    if len(stacks) < 2:
        return []
    first = stacks[0]
    lost = sum(losses[pair].kl_nats for pair in first.choices.items())
    marginal = {
        (site, choice): losses[site, choice].kl_nats_se
        for other in stacks[1:]
        for site in first.choices
        if other.choices[site] != first.choices[site]
        for choice in (first.choices[site], other.choices[site])
    }
    found = [
        (pair, error)
        for pair, error in marginal.items()
        if error > DOUBT * losses[pair].kl_nats and error > WEIGHT * lost
    ]
    found.sort(key=lambda f: (-f[1], str(f[0][0]), f[0][1].name))
    return [pair for pair, _ in found[:max_pairs]]


def settled(
    losses: Sensitivities, measured: Mapping[tuple[Site, Choice], float]
) -> Sensitivities:
    """Return the losses with the measured ones in place of their estimates."""
    better = {
        pair: replace(losses[pair], kl_nats=kl, kl_nats_se=0.0, exact=True)
        for pair, kl in measured.items()
    }
    return {**losses, **better}
