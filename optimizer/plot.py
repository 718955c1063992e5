"""Geometry of the front's plot: scales, ticks, marks, labels that do not collide.

Everything is in the units of the drawing's view box; the template only draws.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from optimizer.units import seconds, seconds_unit, significant

WIDTH, HEIGHT = 900.0, 470.0
LEFT, RIGHT, TOP, BOTTOM = 74.0, 880.0, 26.0, 414.0
_LETTER, _LINE = 7.7, 17.0  # width of a letter and height of a line at 13 units
_LOG_FROM = 30.0  # a wider range than this reads better in powers of ten
_DECADES = 4.5  # what the eye still takes in; less than that lies on the lower edge

Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True, slots=True)
class Point:
    """One stack to draw: seconds per token, nats, bytes."""

    kind: str  # "predicted", "measured" or "uniform"
    per_token_s: float
    kl_nats: float
    memory_bytes: float | None
    title: str
    label: str = ""
    chosen: bool = False
    low: float | None = None  # ends of the interval of a measured KL
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to the drawing; `log` in powers of ten."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the coordinate of `value`; what lies outside goes to the edge."""
        value = min(max(value, self.low), self.high)
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        part = (value - low) / (high - low)
        return round(self.start + part * (self.end - self.start), 1)


@dataclass(frozen=True, slots=True)
class Label:
    """A text and where its left end stands on its line."""

    text: str
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in the drawing; `bar` is the y of the ends of its interval."""

    point: Point
    x: float
    y: float
    radius: float
    bar: tuple[float, float] | None
    label: Label | None = None
    below: bool = False  # its KL lies below the axis


@dataclass(frozen=True, slots=True)
class Limit:
    """The SLA's line; `x` None: it lies outside the drawing, `label` says where."""

    x: float | None
    label: Label


@dataclass(frozen=True, slots=True)
class Plot:
    """All that the template draws."""

    x_ticks: Sequence[Label]
    y_ticks: Sequence[Label]
    x_unit: str
    log: bool
    marks: Sequence[Mark]
    steps: str  # the path of the staircase
    limit: Limit | None
    memory: tuple[float, float] | None  # smallest and largest, bytes


def plot(points: Sequence[Point], sla_s: float | None = None) -> Plot | None:
    """Lay out the points and the SLA's line (seconds per token). None: no points."""
    points = [p for p in points if _drawable(p)]
    if not points:
        return None
    x, y = _x_scale(points, sla_s), _y_scale(points)
    sizes = [p.memory_bytes for p in points if p.memory_bytes is not None]
    memory = (min(sizes), max(sizes)) if sizes else None
    marks = [_mark(p, x, y, memory) for p in points]
    limit = None if sla_s is None else _limit(sla_s, x, marks)
    factor, unit = seconds_unit(x.high)
    return Plot(
        x_ticks=[Label(t, x.at(v), BOTTOM) for v, t in _linear_ticks(x, factor)],
        y_ticks=[Label(t, LEFT, y.at(v)) for v, t in _y_ticks(y)],
        x_unit=unit,
        log=y.log,
        marks=_labelled(marks, limit),
        steps=_staircase(points, x, y),
        limit=limit,
        memory=memory,
    )


def _drawable(p: Point) -> bool:
    return math.isfinite(p.per_token_s + p.kl_nats) and p.per_token_s >= 0


def _x_scale(points: Sequence[Point], sla_s: float | None) -> Scale:
    values = [p.per_token_s for p in points]
    low, high = min(values), max(values)
    span = (high - low) or high * 0.2 or 1.0
    if sla_s is not None and low - 0.35 * span <= sla_s <= high + 0.35 * span:
        low, high = min(low, sla_s), max(high, sla_s)
    pad = 0.08 * ((high - low) or span)
    return Scale(max(low - pad, 0.0), high + pad, LEFT, RIGHT)


def _y_scale(points: Sequence[Point]) -> Scale:
    ends = [v for p in points for v in (p.kl_nats, p.low, p.high) if v is not None]
    positive = [v for v in ends if v > 0 and math.isfinite(v)] or [1e-3]
    low, high = min(positive), max(positive)
    if high / low <= _LOG_FROM and min(ends) >= 0:
        return Scale(0.0, high * 1.1, BOTTOM, TOP)
    low = max(low, high * 10**-_DECADES)
    return Scale(low / 1.5, high * 1.5, BOTTOM, TOP, log=True)


def _linear_ticks(scale: Scale, factor: float) -> list[tuple[float, str]]:
    low, high = scale.low / factor, scale.high / factor
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough)
    numbers = range(math.ceil(low / step), math.floor(high / step) + 1)
    return [(n * step * factor, f"{round(n * step, 9):g}") for n in numbers]


def _y_ticks(scale: Scale) -> list[tuple[float, str]]:
    if not scale.log:
        return _linear_ticks(scale, 1.0)
    low, high = math.log10(scale.low), math.log10(scale.high)
    steps = (1, 2, 5) if high - low < 2.2 else (1, 3) if high - low < 3 else (1,)
    decades = range(math.floor(low), math.ceil(high) + 1)
    values = [s * 10.0**d for d in decades for s in steps]
    return [
        (v, significant(v, 1)) for v in values if scale.low <= v <= scale.high * 1.001
    ]


def _mark(point: Point, x: Scale, y: Scale, memory: tuple[float, float] | None) -> Mark:
    bar = None
    if point.low is not None and point.high is not None:
        bar = (y.at(point.low), y.at(point.high))
    return Mark(
        point=point,
        x=x.at(point.per_token_s),
        y=y.at(point.kl_nats),
        radius=4.0 if point.kind == "measured" else radius(point.memory_bytes, memory),
        bar=bar,
        below=point.kl_nats < y.low,
    )


def radius(memory_bytes: float | None, span: tuple[float, float] | None) -> float:
    """Return 4 for the smallest memory of the span, 10 for the largest."""
    if memory_bytes is None or span is None or span[0] == span[1]:
        return 6.0
    part = (memory_bytes - span[0]) / (span[1] - span[0])
    return round(4.0 + 6.0 * part, 1)


def _staircase(points: Iterable[Point], x: Scale, y: Scale) -> str:
    """Join the predicted points that no other beats in both latency and KL."""
    path, best = "", math.inf
    front = [p for p in points if p.kind == "predicted"]
    for p in sorted(front, key=lambda p: (p.per_token_s, p.kl_nats)):
        if p.kl_nats < best:
            best = p.kl_nats
            px, py = x.at(p.per_token_s), y.at(p.kl_nats)
            path += f"H{px}V{py}" if path else f"M{px} {py}"
    return path


def _limit(sla_s: float, x: Scale, marks: Sequence[Mark]) -> Limit:
    text = f"SLA {seconds(sla_s)}"
    if sla_s > x.high:
        text = f"{text} →"
        return Limit(None, _on_a_free_line(text, RIGHT - _width(text) - 6, marks))
    if sla_s < x.low:
        return Limit(None, _on_a_free_line(f"← {text}", LEFT + 6, marks))
    at = x.at(sla_s)
    fits = at + 6 + _width(text) < RIGHT
    start = at + 6 if fits else at - 6 - _width(text)
    return Limit(at, _on_a_free_line(text, start, marks))


def _on_a_free_line(text: str, x: float, marks: Sequence[Mark]) -> Label:
    """Return the label at the highest place where no mark stands, or the fewest."""
    taken = [box for mark in marks for box in _boxes(mark)]
    count = int((BOTTOM - TOP) / _LINE) - 1
    lines = [Label(text, x, TOP + 14 + n * _LINE) for n in range(count)]
    return min(lines, key=lambda label: _overlap(_text_box(label), taken))


def _width(text: str) -> float:
    return len(text) * _LETTER


def _labelled(marks: Sequence[Mark], limit: Limit | None) -> list[Mark]:
    """Give each label the first place around its mark where nothing else stands."""
    taken = [box for m in marks for box in _boxes(m)]
    if limit is not None:
        taken.append(_text_box(limit.label))
        if limit.x is not None:
            taken.append((limit.x - 3, TOP, limit.x + 3, BOTTOM))
    placed = []
    for mark in marks:
        if mark.point.label:
            places = _places(mark)
            best = min(places, key=lambda p: _overlap(_text_box(p), taken))
            taken.append(_text_box(best))
            mark = replace(mark, label=best)
        placed.append(mark)
    return placed


def _boxes(mark: Mark) -> list[Box]:
    r = mark.radius + (5 if mark.point.chosen else 1)
    boxes = [(mark.x - r, mark.y - r, mark.x + r, mark.y + r)]
    if mark.bar:
        boxes.append((mark.x - 5, mark.bar[1], mark.x + 5, mark.bar[0]))
    return boxes


def _places(mark: Mark) -> list[Label]:
    text, width = mark.point.label, _width(mark.point.label)
    gap = mark.radius + 9
    spots = []
    for away in (gap, gap + 14, gap + 30, gap + 50):
        right, left, middle = mark.x + away, mark.x - away - width, mark.x - width / 2
        for dy in (4.0, 4.0 - away, 4.0 + away):
            spots += [(right, mark.y + dy), (left, mark.y + dy)]
        spots += [(middle, mark.y - away), (middle, mark.y + away + 9)]
    return [Label(text, round(x, 1), round(y, 1)) for x, y in spots]


def _text_box(label: Label) -> Box:
    return label.x, label.y - 13, label.x + _width(label.text), label.y + _LINE - 13


def _overlap(box: Box, taken: Iterable[Box]) -> float:
    """Return the area shared with what is taken, or outside the drawing."""
    inside = _shared(box, (LEFT, TOP, RIGHT, BOTTOM))
    outside = (box[2] - box[0]) * (box[3] - box[1]) - inside
    return round(10 * outside + sum(_shared(box, other) for other in taken), 3)


def _shared(a: Box, b: Box) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return max(width, 0.0) * max(height, 0.0)
