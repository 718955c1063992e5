"""What each site costs on this processor, from whole runs of uniform stacks.

A site's price is its share of a decode step and of a prefill in which all other sites
ran as well, so that prices add up to what the whole took.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from optimizer import local
from optimizer.casts import Casts
from optimizer.cost import SiteCost, site_cost
from optimizer.errors import HardwareError
from optimizer.hardware import Device
from optimizer.kernels import Basis
from optimizer.local_run import (
    Key,
    Spent,
    Times,
    Told,
    opened,
    profiled,
    run,
    silent,
    spread,
)
from optimizer.native import Native
from optimizer.spec import Workload
from optimizer.stack import (
    WHOLE_MODEL,
    Choice,
    Component,
    ModelShape,
    Site,
    SiteShape,
    Stack,
)

NOTE = "sites timed in whole runs of the model, each uniform in one format"
LAST_NORM = Site(WHOLE_MODEL, Component.NORMS)

Kind = tuple[object, ...]  # component and sizes: what equals in it takes equally long
CostOf = Callable[[SiteShape, Choice], SiteCost]


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds of the sites of one model, as they were in whole runs, and of the rest."""

    sites: Mapping[tuple[Kind, str], float]  # by kind and choice
    rest: Mapping[str, float]  # by the last norm's choice
    error: float = (
        math.nan
    )  # the runs' spread from quartile to quartile, over the median

    def of(self, shape: SiteShape, choice: Choice) -> float | None:
        """Return what a site adds at a choice; None: it was not run.

        What no site has goes with the last norm: its format is that of the residual
        stream, which most of the rest works on.
        """
        own = self.sites.get((kind(shape), choice.name))
        if own is None or shape.site != LAST_NORM:
            return own
        return own + self.rest[choice.name]


def kind(shape: SiteShape) -> Kind:
    """Return what two sites must share to take equally long."""
    sizes = (shape.n, shape.k, shape.heads, shape.elements, shape.window)
    return (shape.site.component, shape.site == LAST_NORM, *sizes)


def prices(
    model: ModelShape, runs: Iterable[tuple[Stack, Sequence[float], Sequence[Spent]]]
) -> Prices:
    """Turn runs (a stack, its steps, and the sites' share of each) into prices.

    The first run of a residual stream's format prices its sites, and what is left of
    its steps is the rest. A later one prices what is new in it, by the same factor for
    all of that, so that the sum is what the whole took: what widens weights drives other
    sites' data out of the caches.
    """
    found: dict[tuple[Kind, str], float] = {}
    rest: dict[str, float] = {}
    spreads: list[float] = []
    for stack, steps, parts in runs:
        if not steps:
            continue  # too long to be run
        keys = [(s.site, (kind(s), stack.choices[s.site].name)) for s in model.sites]
        samples: dict[tuple[Kind, str], list[float]] = defaultdict(list)
        for spent in parts:
            for site, key in keys:
                samples[key].append(spent.get(site, 0.0))
        own = {key: statistics.median(seconds) for key, seconds in samples.items()}
        whole, last = statistics.median(steps), stack.choices[LAST_NORM].name
        new = sum(own[key] for _, key in keys if key not in found)
        old = sum(found[key] for _, key in keys if key in found)
        left = whole - old - rest.get(last, 0.0)
        # Where noise leaves nothing for what is new, its own times must do.
        factor = left / new if last in rest and left > 0.0 else 1.0
        rest.setdefault(last, max(0.0, left - new))
        spreads.append(spread(steps))
        found = {**{key: factor * seconds for key, seconds in own.items()}, **found}
    return Prices(found, rest, max(spreads, default=math.nan))


@dataclass(frozen=True, slots=True)
class Profile:
    """What sites cost in a decode step and in a prefill."""

    decode: Prices
    prefill: Prices


def profile(native: Native, workload: Workload, told: Told = silent) -> Profile:
    """Run the stacks that have every choice, and return what each site took in them."""
    stacks = dict(enumerate(profiled(native.shape)))
    return priced(native, stacks, run(native, stacks, workload, told))


def priced(
    native: Native, stacks: Mapping[Key, Stack], times: Mapping[Key, Times]
) -> Profile:
    """Return the prices that timed runs of stacks give."""
    decode = [(s, times[k].decode, times[k].decode_sites) for k, s in stacks.items()]
    prefill = [(s, times[k].prefill, times[k].prefill_sites) for k, s in stacks.items()]
    return Profile(prices(native.shape, decode), prices(native.shape, prefill))


def costs(
    model: ModelShape, device: Device, workload: Workload, own: Profile
) -> CostOf:
    """Return a cost function on a profile; what it lacks is run alone, kernel by kernel."""
    alone = local.measured(model, device, workload)

    def cost_of(shape: SiteShape, choice: Choice) -> SiteCost:
        decode_s = own.decode.of(shape, choice)
        prefill_s = own.prefill.of(shape, choice)
        if decode_s is None or prefill_s is None:
            other = alone(shape, choice)
            decode_s = other.per_token_s if decode_s is None else decode_s
            prefill_s = other.first_token_s if prefill_s is None else prefill_s
        return replace(
            site_cost(shape, choice, device, workload, model),
            per_token_s=decode_s,
            first_token_s=prefill_s,
            basis=Basis.MEASURED,
            error=own.decode.error,
            first_basis=Basis.MEASURED,
            first_error=own.prefill.error,
        )

    return cost_of


def target(
    folder: Path, model: ModelShape, workload: Workload, told: Told = silent
) -> tuple[Device, CostOf, Casts]:
    """Return this processor and what sites and casts cost on it, timed in whole runs.

    Where the model cannot be run, kernels are, one by one; the device's notes say why.
    """
    device, casts = local.device(), local.casts(model, workload)
    try:
        own = profile(opened(folder), workload, told)
    except HardwareError as no:
        device = replace(device, notes=(*device.notes, str(no)))
        return device, local.measured(model, device, workload), casts
    return replace(device, notes=(NOTE,)), costs(model, device, workload, own), casts
