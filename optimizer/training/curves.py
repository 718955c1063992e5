"""Geometry of the training report's drawings: loss curves, exponents by layer.

Everything is in the units of the drawings' view boxes; the template only draws.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optimizer.formats import E4M3, E5M2, FP16, Format
from optimizer.units import significant

WIDTH, HEIGHT = 900.0, 400.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 884.0, 16.0, 350.0
MOST_POINTS = 150  # of a curve; longer ones are averaged
ROW, GAP, NAMES = 20.0, 4.0, 190.0  # of the strips: height, distance, room for names
HEAD = 56.0  # above the strips: names of limits

Json = dict[str, Any]
Tick = tuple[float, str]  # coordinate, text


@dataclass(frozen=True, slots=True)
class Curve:
    """One run's losses; `kind` is a number for its color, or "base", "again"."""

    name: str
    kind: str
    path: str
    stopped: tuple[float, float] | None  # where it ended before the others


@dataclass(frozen=True, slots=True)
class Curves:
    """All that is drawn of the losses."""

    curves: Sequence[Curve]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]


Losses = Sequence[float | None]


def curves(runs: Sequence[tuple[str, str, Losses]]) -> Curves | None:
    """Lay out runs of (name, kind, losses), the baseline first. None: no losses."""
    steps = max((len(losses) for _, _, losses in runs), default=0)
    values = [v for _, _, losses in runs[:2] for v in losses if v is not None]
    if not values or steps < 2:
        return None
    low, high = min(values), max(values)
    pad = 0.06 * ((high - low) or high or 1.0)
    low, high = low - pad, high + 3 * pad  # a little more where candidates rise

    def at(step: float, loss: float) -> tuple[float, float]:
        x = LEFT + (RIGHT - LEFT) * step / (steps - 1)
        y = BOTTOM - (BOTTOM - TOP) * (min(max(loss, low), high) - low) / (high - low)
        return round(x, 1), round(y, 1)

    drawn = []
    for name, kind, losses in runs:
        points = [at(step, loss) for step, loss in _thinned(losses)]
        path = "M" + "L".join(f"{x} {y}" for x, y in points) if points else ""
        ended = points[-1] if points and len(losses) < steps else None
        drawn.append(Curve(name, kind, path, ended))
    x_ticks = [(at(s, low)[0], f"{s}") for s in _round_numbers(0, steps - 1)]
    y_ticks = [(at(0, v)[1], f"{v:g}") for v in _round_numbers(low, high)]
    return Curves(drawn, x_ticks, y_ticks)


def _thinned(losses: Losses) -> list[tuple[float, float]]:
    """Return (step, loss), averaged over neighbors where there are many."""
    each = math.ceil(len(losses) / MOST_POINTS)
    found = []
    for start in range(0, len(losses), max(each, 1)):
        part = [v for v in losses[start : start + each] if v is not None]
        if part:
            found.append((start + (len(part) - 1) / 2, sum(part) / len(part)))
    return found


def _round_numbers(low: float, high: float) -> list[float]:
    """Return some six round numbers within the range."""
    rough = (high - low) / 6 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    numbers = [round(n * step, 9) for n in range(first, last + 1)]
    return [int(n) if n == int(n) else n for n in numbers]


# -- exponents --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """One power of two of one layer."""

    x: float
    opacity: float
    title: str


@dataclass(frozen=True, slots=True)
class Strip:
    """One layer: its cells, and how far FP8 reaches down under its own scale."""

    layer: str
    y: float
    cells: Sequence[Cell]
    fp8: tuple[float, float] | None  # x from, to
    zeros: str


@dataclass(frozen=True, slots=True)
class Strips:
    """The exponents of one role in every layer, over the range of fp16."""

    role: str
    fp8: str  # the format of the role
    strips: Sequence[Strip]
    cell: float  # width
    height: float
    ticks: Sequence[Tick]
    limits: Sequence[Tick]  # of fp16


def strips(rows: Sequence[Mapping[str, Any]], role: str) -> Strips | None:
    """Lay out the histograms of a role. None: there are none."""
    mine = [r for r in rows if r.get("role") == role and r.get("counts")]
    if not mine:
        return None
    low = min(min(r["first"] for r in mine), -26)
    high = max(max(r["first"] + len(r["counts"]) for r in mine), 17)
    cell = (RIGHT - NAMES) / (high - low)
    fmt = E5M2 if role != "input" else E4M3

    def at(exponent: float) -> float:
        return round(NAMES + cell * (min(max(exponent, low), high) - low), 1)

    drawn = [_strip(r, HEAD + n * (ROW + GAP), at, fmt) for n, r in enumerate(mine)]
    limits = [
        (at(math.log2(FP16.smallest_subnormal) - 1), "fp16: zero"),
        (at(math.log2(FP16.smallest_normal)), "fp16: normal"),
        (at(16), "fp16: inf"),
    ]
    step = 8 if high - low > 40 else 4
    ticks = [(at(e), f"2^{e}") for e in range(-(-low // step) * step, high + 1, step)]
    height = HEAD + len(mine) * (ROW + GAP) + 26
    return Strips(role, fmt.name, drawn, cell, height, ticks, limits)


def _strip(row: Mapping[str, Any], y: float, at: Any, fmt: Format) -> Strip:
    total = sum(row["counts"]) or 1
    most = max(row["counts"]) or 1
    cells = [
        Cell(
            at(row["first"] + i),
            round(0.12 + 0.88 * math.sqrt(count / most), 3),
            f"2^{row['first'] + i}: {significant(100 * count / total)} %",
        )
        for i, count in enumerate(row["counts"])
        if count
    ]
    zeros = row.get("zeros", 0) / max(row.get("elements", 0), 1)
    fp8, amax = None, row.get("amax") or 0.0
    if amax > 0:
        scale = amax / fmt.max
        fp8 = (at(math.log2(scale * fmt.smallest_subnormal / 2)), at(math.log2(amax)))
    return Strip(str(row.get("layer")), y, cells, fp8, f"{100 * zeros:.3g} % zero")
