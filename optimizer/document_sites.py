"""The part of the document that goes site by site."""

import math
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from optimizer.casts import CastCost, Casts
from optimizer.choose import Row
from optimizer.padding import padding
from optimizer.reasons import why_high, why_range, why_token
from optimizer.stack import WHOLE_MODEL, Choice, Component, Role, Site, Stack

if TYPE_CHECKING:
    from optimizer.document import Rounding, Run


def components(run: "Run", stack: Stack) -> list[dict[str, Any]]:
    """Return what every kind of site got, loses and costs, casts included."""
    by_component: dict[Component, dict[Site, Choice]] = {}
    for site, choice in stack.choices.items():
        by_component.setdefault(site.component, {})[site] = choice
    order = [c for c in Component if c in by_component]
    return [_component(run, c, by_component[c], stack) for c in order]


def _component(
    run: "Run", component: Component, choices: Mapping[Site, Choice], stack: Stack
) -> dict[str, Any]:
    totals = run.chooser.totals(Stack(choices))
    cast = casts_into(run.chooser.casts, choices, stack)
    counts = Counter(c.name for c in choices.values())
    return {
        "component": str(component),
        "choice": counts.most_common(1)[0][0],
        "choices": dict(counts.most_common()),
        "sites": len(choices),
        "kl_nats": added_kl_nats(run, Stack(choices)),
        "per_token_s": totals.per_token_s + cast.per_token_s,
        "first_token_s": totals.first_token_s + cast.first_token_s,
        "bytes": totals.memory_bytes,
    }


def casts_into(casts: Casts, readers: Container[Site], stack: Stack) -> CastCost:
    """Return what the casts of a stack cost that bring `readers` their input.

    Every cast is one reader's, and no component reads itself: so what components
    cost, casts into them included, adds up to the stack.
    """
    pairs = tuple(pair for pair in casts.pairs if pair[1] in readers)
    return replace(casts, pairs=pairs).total(stack.choices)


def added_kl_nats(run: "Run", stack: Stack) -> float:
    """What the sites lose alone, added up and not corrected."""
    return math.fsum(run.chooser.kl_sums(stack).values())


def layers(stack: Stack, count: int) -> list[dict[str, Any]]:
    """Return what every layer got."""
    rows: list[dict[str, Any]] = [{"layer": i, "choices": {}} for i in range(count)]
    for site, choice in stack.choices.items():
        if site.layer != WHOLE_MODEL:
            rows[site.layer]["choices"][str(site.component)] = choice.name
    return rows


def site_row(run: "Run", site: Site, stack: Stack) -> dict[str, Any]:
    """Return one site of a stack, with its alternatives."""
    choice = stack.choices[site]
    rows = run.chooser.table[site]
    shape = next(s for s in run.model.shape.sites if s.site == site)
    mine = _alternative(run.chooser.row(site, choice))
    stats = run.evidence.statistics.of(site)
    cast = casts_into(run.chooser.casts, (site,), stack)
    return {
        "site": str(site),
        "component": str(site.component),
        "layer": None if site.layer == WHOLE_MODEL else site.layer,
        "choice": choice.name,
        "kl_nats": mine["kl_nats"],
        "per_token_s": mine["per_token_s"],
        "first_token_s": mine["first_token_s"],
        "bytes": mine["bytes"],
        "scale_ratios": scale_ratios(run.rounding, site),
        "casts": asdict(cast),  # of its input: the seconds above are the site's alone
        "reason": why_high(rows, choice),
        "padding": asdict(to) if (to := padding(shape, choice)) else None,
        "range": why_range(rows, stats),
        "scales": why_token(rows, stats.get(Role.INPUT), run.evidence.text_of),
        "alternatives": [_alternative(r) for r in rows],
    }


def scale_ratios(rounding: "Rounding", site: Site) -> dict[str, Any]:
    """Return the site's static scales that are not amax's, by role, as ratios to it.

    Below 1 the largest values are clipped. A list has one for each head.
    """
    if rounding.gain is None or rounding.used != "compensated":
        return {}
    places = {tuple(k.split(" ")): v for k, v in rounding.gain.static_scales.items()}
    return {role: ratio for (at, role), ratio in places.items() if at == str(site)}


def _alternative(row: Row) -> dict[str, Any]:
    loss, cost = row.sensitivity, row.cost
    return {
        "choice": row.choice.name,
        "kl_nats": loss.kl_nats if loss else None,
        "kl_nats_se": _finite(loss.kl_nats_se) if loss else None,
        "exact": loss.exact if loss else None,
        "sqnr_db": _finite(loss.sqnr_db) if loss else None,
        "saturated": loss.saturated if loss else None,
        "flushed": loss.flushed if loss else None,
        "collapsed": loss.collapsed if loss else None,
        "collapsed_pairs": loss.collapsed_pairs if loss else None,
        "per_token_s": cost.per_token_s if cost else None,
        "basis": str(cost.basis) if cost else None,  # of the seconds
        "first_token_s": cost.first_token_s if cost else None,
        "bytes": cost.weight_bytes + cost.kv_bytes if cost else None,
        "refused": row.refused,
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity: None says that nothing was lost."""
    return value if math.isfinite(value) else None
