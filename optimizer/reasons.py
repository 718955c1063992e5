"""Why a site stayed high, and what would meet a target that nothing here meets."""

from collections.abc import Sequence

from optimizer.choose import Chooser, Row, Totals
from optimizer.cost import SiteCost, site_cost
from optimizer.hardware import DEVICES, Device, refusals
from optimizer.spec import OptimizeSpec
from optimizer.stack import Choice, ModelShape
from optimizer.units import seconds


def why_high(rows: Sequence[Row], chosen: Choice) -> str | None:
    """Say why a site did not get FP8. None: it did."""
    if chosen.is_fp8:
        return None
    narrow = [r for r in rows if r.choice.is_fp8]
    usable = [r for r in narrow if r.refused is None]
    if not narrow:
        return "no FP8 choice exists for this kind of site"
    if not usable:
        return f"FP8 is refused: {narrow[0].refused}"
    mine = next(r for r in rows if r.choice == chosen)
    best = min(usable, key=lambda r: (_cost(r).per_token_s, _loss(r)))
    saved = _cost(mine).per_token_s - _cost(best).per_token_s
    added = _loss(best) - _loss(mine)
    if saved <= 0:
        return (
            f"FP8 saves no time: {seconds(_cost(best).per_token_s)} as "
            f"{best.choice.name}, {seconds(_cost(mine).per_token_s)} as {chosen.name}"
        )
    return (
        f"{best.choice.name} would save {seconds(saved)} per token for {added:.2g} "
        "nats: the chosen stack did not need that time, or found it for less"
    )


def _cost(row: Row) -> SiteCost:
    assert row.cost is not None
    return row.cost


def _loss(row: Row) -> float:
    assert row.sensitivity is not None
    return row.sensitivity.kl_nats


def would_meet(chooser: Chooser, nearest: Totals, spec: OptimizeSpec) -> list[str]:
    """Say what would meet targets that this device cannot: another target or device."""
    sla, said = spec.latency_sla, []
    if nearest.memory_bytes > chooser.max_bytes:
        need = nearest.memory_bytes / 1e9
        said.append(f"{need:.3g} GB of memory: the smallest stack needs that much")
    if sla.per_token_s is not None and nearest.per_token_s > sla.per_token_s:
        said.append(f"latency_sla.per_token_s of {nearest.per_token_s:.3g} s or more")
    if sla.first_token_s is not None and nearest.first_token_s > sla.first_token_s:
        said.append(
            f"latency_sla.first_token_s of {nearest.first_token_s:.3g} s or more"
        )
    others = [
        d.id
        for d in DEVICES.values()
        if d.id != spec.hardware
        and _fastest_possible(chooser.model, d, spec).meets(sla)
    ]
    if others:
        said.append(f"other hardware (modelled): {', '.join(others)}")
    return said


def _fastest_possible(model: ModelShape, device: Device, spec: OptimizeSpec) -> Totals:
    """The least of every site on a device: a bound that no stack beats."""
    per_token = first_token = 0.0
    for shape in model.sites:
        verdicts = refusals(device, spec.engine, shape, spec.formats)
        costs = [
            site_cost(shape, c, device, spec.workload, model)
            for c, no in verdicts.items()
            if no is None
        ]
        per_token += min((c.per_token_s for c in costs), default=float("inf"))
        first_token += min((c.first_token_s for c in costs), default=float("inf"))
    return Totals(0.0, per_token, first_token, 0, 0)
