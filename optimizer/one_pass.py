"""Encoders generate nothing: what a request costs is one pass over its batch.

The search and the targets know two times, to the first token and per token. Of an
encoder both are that of the pass, whose length is the workload's prompt.
"""

from collections.abc import Callable
from dataclasses import replace

from optimizer.casts import CastCost, Casts, Pair
from optimizer.cost import SiteCost
from optimizer.stack import Choice, Component, ModelShape, SiteShape

CostOf = Callable[[SiteShape, Choice], SiteCost]


def generates(model: ModelShape) -> bool:
    """Whether the model writes token after token, and keeps a cache to do so."""
    return any(s.site.component is Component.KV_CACHE for s in model.sites)


def of_pass(cost_of: CostOf) -> CostOf:
    """Return the costs of sites that no decode step runs."""

    def cost(shape: SiteShape, choice: Choice) -> SiteCost:
        found = cost_of(shape, choice)
        return replace(found, per_token_s=found.first_token_s)

    return cost


def casts_of_pass(casts: Casts) -> Casts:
    """Return the same of the casts between them."""

    def cost(pair: Pair, producer: Choice, consumer: Choice) -> CastCost:
        once = casts.cost_of(pair, producer, consumer).first_token_s
        return CastCost(once, once)

    return Casts(casts.pairs, cost)
