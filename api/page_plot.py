"""The front as a drawing: seconds per token against nats, one mark per stack.

Everything is in the units of the drawing's view box; the template only draws. Nats
are drawn in powers of ten where they range widely, and what is nearly nothing then
lies on the lower edge.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from optimizer.plot import Scale
from optimizer.units import nats, seconds, seconds_unit, share, significant

WIDTH, HEIGHT = 640.0, 340.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 622.0, 16.0, 292.0
WIDE = 30.0  # a wider range than this reads better in powers of ten
DECADES = 4.0
TICKS = 5
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """One stack: seconds per token, nats, and what it is."""

    kind: str  # predicted, measured
    per_token_s: float
    kl_nats: float
    title: str
    chosen: bool = False


@dataclass(frozen=True, slots=True)
class Drawn:
    """The points of one job."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """A point where it lies in the drawing; `series` counts the jobs from 0."""

    x: float
    y: float
    series: int
    point: Point


@dataclass(frozen=True, slots=True)
class Tick:
    """A line of the grid and what stands beside it."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Plot:
    """All that the template draws."""

    marks: tuple[Mark, ...]
    steps: tuple[str, ...]  # one path for each job
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    unit: str
    limit_x: float | None  # where the target lies, if it is in sight
    said: str


def drawn(name: str, front: Sequence[Json], chosen: Json) -> Drawn:
    """Return the points of a job's front; measured figures replace predicted ones."""
    found = []
    for row in front:
        measured = row.get("measured_kl_nats")
        if isinstance(measured, dict):
            measured = measured.get("value")
        mine = row.get("id") == chosen.get("front_id")
        loss = measured if measured is not None else row.get("kl_nats")
        kind = "predicted" if measured is None else "measured"
        title = f"{row.get('id')}: {_title(row, loss, kind)}"
        found.append((kind, row.get("per_token_s"), loss, title, mine))
    return Drawn(name, _points(found))


def emerging(name: str, told: Iterable[Json]) -> Drawn:
    """Return the points that a running job has told of so far."""
    rows = [
        (
            "measured",
            row.get("per_token_s"),
            row.get("kl_nats"),
            f"stack {number}: {_title(row, row.get('kl_nats'), 'measured')}",
            False,
        )
        for number, row in enumerate(told, 1)
    ]
    return Drawn(name, _points(rows))


def of_jobs(every: Sequence[Drawn], sla_s: float | None) -> Plot | None:
    """Return the drawing of one job's front, or of several. None: there is no point."""
    points = [point for one in every for point in one.points]
    if not points:
        return None
    x = _x_scale([p.per_token_s for p in points], sla_s)
    y = _y_scale([p.kl_nats for p in points])
    marks = [
        Mark(x.at(p.per_token_s), y.at(p.kl_nats), series, p)
        for series, one in enumerate(every)
        for p in one.points
    ]
    factor, unit = seconds_unit(x.high)
    return Plot(
        marks=tuple(sorted(marks, key=lambda mark: mark.point.chosen)),
        steps=tuple(_steps(one, x, y) for one in every if one.points),
        x_ticks=tuple(Tick(x.at(v), significant(v / factor)) for v in _ticks(x)),
        y_ticks=tuple(Tick(y.at(v), _nats(v, y)) for v in _ticks(y)),
        unit=unit,
        limit_x=x.at(sla_s) if sla_s and x.low <= sla_s <= x.high else None,
        said=_said(points, sla_s),
    )


def _title(row: Json, loss: Any, kind: str) -> str:
    narrow = f", {share(row['fp8_share'])} in FP8" if "fp8_share" in row else ""
    return f"{seconds(row.get('per_token_s'))} a token, {nats(loss)} {kind}{narrow}"


def _points(rows: Iterable[tuple[str, Any, Any, str, bool]]) -> tuple[Point, ...]:
    return tuple(
        Point(kind, float(took), max(float(loss), 0.0), title, chosen)
        for kind, took, loss, title, chosen in rows
        if took is not None and loss is not None
    )


def _x_scale(values: Sequence[float], sla_s: float | None) -> Scale:
    low, high = min(values), max(values)
    if sla_s and sla_s <= 2 * high and sla_s >= low / 2:  # farther, it hides the front
        low, high = min(low, sla_s), max(high, sla_s)
    margin = (high - low) * 0.06 or high * 0.05 or 1.0
    return Scale(max(low - margin, 0.0), high + margin, LEFT, RIGHT)


def _y_scale(values: Sequence[float]) -> Scale:
    high = max(values) or 1e-6
    positive = [v for v in values if v > 0]
    low = max(min(positive, default=high), high / 10**DECADES)
    if high / low > WIDE:
        bottom, top = math.floor(math.log10(low)), math.ceil(math.log10(high))
        return Scale(10.0**bottom, 10.0**top, BOTTOM, TOP, log=True)
    return Scale(0.0, high * 1.1, BOTTOM, TOP)


def _ticks(scale: Scale) -> list[float]:
    if scale.log:
        first, last = round(math.log10(scale.low)), round(math.log10(scale.high))
        return [10.0**power for power in range(first, last + 1)]
    rough = (scale.high - scale.low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough)
    first = math.ceil(scale.low / step)
    return [n * step for n in range(first, math.floor(scale.high / step) + 1)]


def _nats(value: float, scale: Scale) -> str:
    if not scale.log:
        return significant(value)
    power = round(math.log10(value))
    return "10" + str(power).translate(SUPERSCRIPTS)


def _steps(one: Drawn, x: Scale, y: Scale) -> str:
    """Return the path under which nothing lies: what is lost at most, by the time."""
    best, path = math.inf, ""
    for point in sorted(one.points, key=lambda p: (p.per_token_s, p.kl_nats)):
        if point.kl_nats >= best:
            continue
        here = x.at(point.per_token_s), y.at(point.kl_nats)
        path += f"H{here[0]}V{here[1]}" if path else f"M{here[0]} {here[1]}"
        best = point.kl_nats
    return path


def _said(points: Sequence[Point], sla_s: float | None) -> str:
    """Return what the drawing shows, for who does not see it."""
    fastest = min(points, key=lambda p: (p.per_token_s, p.kl_nats))
    least = min(points, key=lambda p: (p.kl_nats, p.per_token_s))
    aim = f" The target is {seconds(sla_s)} a token." if sla_s else ""
    return (
        f"{len(points)} stacks. The fastest: {fastest.title}. "
        f"The one that loses least: {least.title}.{aim}"
    )
