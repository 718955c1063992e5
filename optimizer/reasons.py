"""Why: a site stayed high, e5m2 lost or won, one scale is too few, nothing meets.

Sentences for people, each from figures that were measured.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from optimizer.choose import Chooser, Row, Totals
from optimizer.cost import SiteCost, site_cost
from optimizer.formats import E4M3, E5M2, Format
from optimizer.hardware import DEVICES, Device
from optimizer.rules import refusals
from optimizer.spec import OptimizeSpec
from optimizer.stack import (
    WHOLE_MODEL,
    Choice,
    Granularity,
    ModelShape,
    Role,
    SiteShape,
)
from optimizer.statistics import SiteStats
from optimizer.units import seconds
from optimizer.watch import Place

EVEN = 1.05  # losses within 5 % are the same loss
FLUSHES_MUCH = 0.01  # of the values: more than this is said, even where it costs little
# A fifth less noise: less is not worth finding a maximum in every token at run time.
TOKEN_GAIN_DB = 1.0
REST = 0.999  # quantile: what is larger is an outlier, and not what is to be kept
GROWING = 1.5  # times the bucket before; steady values stay below 1.2


def why_high(rows: Sequence[Row], chosen: Choice) -> str | None:
    """Say why a site did not get FP8. None: it did."""
    if chosen.is_narrow:
        return None
    narrow = [r for r in rows if r.choice.is_narrow]
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


# Range or precision


def why_range(rows: Sequence[Row], stats: Mapping[Role, SiteStats]) -> str | None:
    """Say why e5m2 loses or wins against e4m3 at a site. None: not both were measured.

    `stats` are those of the site's places. e5m2 trades one bit of fraction (6 dB) for
    2^15 times the range below the largest value: that pays where the range is short.
    """
    pair = [_named(rows, name) for name in ("fp8_e4m3", "fp8_e5m2")]
    losses = [r.sensitivity for r in pair if r is not None and r.sensitivity]
    if len(losses) < 2:
        return None
    four, five = losses
    figures = f"{five.kl_nats:.2g} nats against {four.kl_nats:.2g}"
    bits = f"SQNR {five.sqnr_db:.1f} dB against {four.sqnr_db:.1f} dB"
    place = _most_flushed(stats)
    if five.kl_nats > EVEN * four.kl_nats:
        start = f"precision-limited: e5m2 loses more than e4m3 ({figures}; {bits})"
        return f"{start}: one bit of fraction less{_not_short(place)}"
    if four.kl_nats > EVEN * five.kl_nats:
        start = f"range-limited: e5m2 loses less than e4m3 ({figures}; {bits})"
        return f"{start}{_short(place)}"
    if five.kl_nats == four.kl_nats == 0.0:
        return None
    return f"even: e5m2 loses as much as e4m3 ({figures}; {bits})"


def _named(rows: Sequence[Row], name: str) -> Row | None:
    return next((r for r in rows if r.choice.name == name and not r.refused), None)


def _most_flushed(stats: Mapping[Role, SiteStats]) -> tuple[Role, SiteStats] | None:
    """Return the place where e4m3, with one scale, flushes the largest share."""
    full = [(role, s) for role, s in sorted(stats.items()) if s.amax > 0]
    return max(full, key=lambda item: _flushed(item[1], E4M3), default=None)


def _flushed(stats: SiteStats, fmt: Format) -> float:
    return stats.magnitudes.flushed(stats.amax / fmt.max, fmt)


def _full(stats: SiteStats, fmt: Format) -> float:
    return 1 - stats.magnitudes.subnormal(stats.amax / fmt.max, fmt)


def _not_short(place: tuple[Role, SiteStats] | None) -> str:
    if place is None:
        return ""
    role, stats = place
    lost = _flushed(stats, E4M3)
    if lost > FLUSHES_MUCH:
        return (
            f"; e4m3 flushes {_percent(lost)} of the {role} values to zero, but those "
            "weigh little"
        )
    return (
        f", and the range is not short: e4m3 flushes {_percent(lost)} of the {role} "
        f"values to zero and keeps {_percent(_full(stats, E4M3))} in full precision"
    )


def _short(place: tuple[Role, SiteStats] | None) -> str:
    if place is None:
        return ""
    role, stats = place
    spread = stats.amax / stats.magnitudes.quantile(0.5)
    return (
        f": the largest {role} value is {spread:.3g} times the median; e4m3 flushes "
        f"{_percent(_flushed(stats, E4M3))} to zero and keeps "
        f"{_percent(_full(stats, E4M3))} in full precision, e5m2 "
        f"{_percent(_full(stats, E5M2))}"
    )


def _percent(share: float) -> str:
    if 0 < share < 1e-5:
        return "less than 0.001 %"
    return f"{100 * share:.3g} %"


# One scale for all tokens, or one for each


def token_gain_db(stats: SiteStats) -> float:
    """Return what scales of their own gain the ordinary values of ordinary tokens, dB.

    Both are expected from the histogram, for e4m3: with the scale that the largest
    value sets, and with that of the median token. Outliers (beyond the 99.9th
    percentile) are left out: they survive either way. How values happen to lie
    between powers of two is averaged out: another scale would move that, too.
    """
    if not stats.amax or not stats.median_token:
        return 0.0
    limit = min(stats.magnitudes.quantile(REST), stats.median_token)
    scales = [largest / E4M3.max for largest in (stats.amax, stats.median_token)]
    shared, own = (
        stats.magnitudes.sqnr_db(s, E4M3, limit, any_alignment=True) for s in scales
    )
    return own - shared


def advised(stats: SiteStats) -> Granularity:
    """Return the granularity that the values call for: token, or tensor where it does."""
    wide = token_gain_db(stats) >= TOKEN_GAIN_DB
    return Granularity.TOKEN if wide else Granularity.TENSOR


def why_token(
    rows: Sequence[Row],
    stats: SiteStats | None,
    text_of: Callable[[int], str] | None = None,
) -> str | None:
    """Name who makes one scale too coarse for all tokens. None: it is fine enough."""
    if stats is None or advised(stats) is Granularity.TENSOR:
        return None
    if not any(r.choice.input.granularity is Granularity.TOKEN for r in rows):
        return None
    lost = _flushed(stats, E4M3)
    said = (
        f"one scale for all tokens is set by {_culprit(stats, text_of)}; it flushes "
        f"{_percent(lost)} of the values to zero, and a scale for each token gains "
        f"the others {token_gain_db(stats):.1f} dB"
    )
    pair = [_named(rows, name) for name in ("fp8_e4m3_token", "fp8_e4m3")]
    losses = [_loss(r) for r in pair if r is not None]
    if len(losses) == 2:
        said += f" ({losses[0]:.2g} nats against {losses[1]:.2g})"
    return said


def _culprit(stats: SiteStats, text_of: Callable[[int], str] | None) -> str:
    said = f"a value of {stats.amax:.4g}"
    for sink, times in stats.sink_tokens()[:1]:
        text = "" if text_of is None or sink.token < 0 else f" {text_of(sink.token)!r}"
        said += f" of the token{text} at position {sink.position}"
        said += f" ({times:.3g} times the median token)"
    for channel, _, times in stats.outlier_channels()[:1]:
        said += f" in channel {channel} ({times:.3g} times the median channel)"
    return said


# Length


def growing(
    places: Mapping[Place, SiteStats], context: int, calibrated: int
) -> list[str]:
    """Warn of scales that a context longer than the calibrated one would break.

    Places whose amax still grew where the calibrated sequences ended are named.
    """
    if context <= calibrated:
        return []
    grown = [(g, *p) for p, s in places.items() if (g := s.growth()) and g >= GROWING]
    if not grown:
        return []
    times, site, role = max(grown)
    more = len(grown) - 1
    others = f", and {more} other place{'s' * (more > 1)}" if more else ""
    return [
        f"amax still grows where calibration ends, at {calibrated} tokens: at {site} "
        f"{role} {times:.2g} times from one doubling of the position to the next"
        f"{others}. Static scales may clip in the workload's {context} tokens: "
        "calibrate on sequences of that length"
    ]


# Targets


def would_meet(chooser: Chooser, nearest: Totals, spec: OptimizeSpec) -> list[str]:
    """Say what would meet targets that this device cannot: another target or device."""
    sla, said = spec.latency_sla, []
    if nearest.memory_bytes > chooser.max_bytes:
        need = nearest.memory_bytes / 1e9
        said.append(f"{need:.3g} GB of memory: the smallest stack needs that much")
    if sla.per_token_s is not None and nearest.per_token_s > sla.per_token_s:
        said.append(f"latency_sla.per_token_s of {_from(nearest.per_token_s)}")
    if sla.first_token_s is not None and nearest.first_token_s > sla.first_token_s:
        said.append(f"latency_sla.first_token_s of {_from(nearest.first_token_s)}")
    others = [
        d.id
        for d in DEVICES.values()
        if d.id != spec.hardware
        and _fastest_possible(chooser.model, d, spec).meets(sla)
    ]
    if others:
        said.append(f"other hardware (modelled): {', '.join(others)}")
    return said


def _from(least_s: float) -> str:
    """Return a target, rounded up to three digits: rounded down it would be missed."""
    unit = 10.0 ** (math.floor(math.log10(least_s)) - 2)
    return f"{math.ceil(least_s / unit) * unit:.3g} s or more"


def _fastest_possible(model: ModelShape, device: Device, spec: OptimizeSpec) -> Totals:
    """The least of every site on a device: a bound that no stack beats."""
    per_token = first_token = 0.0
    alike = Counter(_of_any_layer(shape) for shape in model.sites)
    for shape, count in alike.items():
        verdicts = refusals(device, spec.engine, shape, spec.formats)
        costs = [
            site_cost(shape, c, device, spec.workload, model)
            for c, no in verdicts.items()
            if no is None
        ]
        per_token += count * min((c.per_token_s for c in costs), default=math.inf)
        first_token += count * min((c.first_token_s for c in costs), default=math.inf)
    return Totals(0.0, per_token, first_token, 0, 0)


def _of_any_layer(shape: SiteShape) -> SiteShape:
    """Return the shape in the first layer: equal ones cost the same in every layer."""
    if shape.site.layer == WHOLE_MODEL:
        return shape
    return replace(shape, site=replace(shape.site, layer=0))
