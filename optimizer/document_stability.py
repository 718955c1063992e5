"""How safe the chosen stack is to serve: what saturates, is flushed, collapses, falls back."""

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from optimizer.break_even import break_even
from optimizer.choose import Row
from optimizer.one_pass import generates
from optimizer.stability import stability
from optimizer.stack import Component, Site, Stack

if TYPE_CHECKING:
    from optimizer.document import Run

SHARES = ("saturated", "flushed", "collapsed")


def steadiness(run: "Run", chosen: Stack) -> dict[str, Any]:
    """Return the stability of the chosen stack, and of its components the worst sites.

    `fallback` is measured on the held-out data, `fallback_at_most` follows from what
    saturates of each site; shares are of elements, of what each site got.
    """
    quality = run.validation.stacks[run.verdict.label]
    bound = stability(run.chooser, chosen)
    rows = [(site, run.chooser.row(site, c)) for site, c in chosen.choices.items()]
    narrow = [(site, row) for site, row in rows if row.choice.is_narrow]
    return {
        "saturated": bound.saturated,
        "fallback": quality.fallback,
        "fallback_at_most": bound.fallback,
        "p99_token_kl_nats": quality.p99_token_kl_nats,
        "worst_token_kl_nats": quality.worst_token_kl_nats,
        "pays_up_to": _pays(run, chosen),
        "narrow_sites": len(narrow),
        "components": _components(narrow),
    }


def _pays(run: "Run", chosen: Stack) -> dict[str, float] | None:
    """Return the fallback rates from which on FP8 no longer pays, as modelled.

    None: nothing of the stack computes in FP8, or the device's times are not modelled.
    """
    computes = any(c.input.format.startswith("fp8") for c in chosen.choices.values())
    if run.basis != "modelled" or not computes or not generates(run.model.shape):
        return None
    rates = break_even(run.model.shape, chosen, run.device, run.spec.workload)
    return {"per_token": rates.per_token, "first_token": rates.first_token}


def _components(rows: Sequence[tuple[Site, Row]]) -> list[dict[str, Any]]:
    found = []
    for component in Component:
        mine = [(s, r) for s, r in rows if s.component is component]
        if mine:
            shares = {share: _worst(mine, share) for share in SHARES}
            found.append({"component": str(component), "sites": len(mine), **shares})
    return found


def _worst(rows: Sequence[tuple[Site, Row]], share: str) -> dict[str, Any] | None:
    known = [
        (getattr(row.sensitivity, share), str(site), row.choice.name)
        for site, row in rows
        if row.sensitivity is not None
    ]
    if not known:
        return None
    most, site, choice = max(known, key=lambda one: one[0])
    middle = median(value for value, _, _ in known)
    return {"median": middle, "largest": most, "site": site, "choice": choice}
