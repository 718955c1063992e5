"""Rows of a measured profile, as the grids that `Tables` read.

A profile has the shapes of one model, so a grid of theirs has more gaps than points. A
reading needs its point, or a line through its point along one axis (as a rule the
number of tokens) with three points or more: two say nothing about what lies between.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from optimizer.attention_times import Section
from optimizer.errors import HardwareError
from optimizer.fits import Kernel
from optimizer.grid import Grid, grid
from optimizer.kernel_tables import Layout

Row = Mapping[str, Any]

ROW_KINDS = (
    "gemm",
    "context_attention",
    "generation_attention",
    "quantize",
    "all_reduce",
)


LEAST_ROWS = 3
_PARTS = {
    ("context_attention", "bf16"): "context",
    ("generation_attention", "bf16"): "generation",
}


class Measured(TypedDict):
    """The grids of a profile, by the names of the fields of `Tables`."""

    gemms: dict[str, Grid]
    context: dict[Layout, Section]
    generation: dict[Layout, Section]
    casts: dict[str, Grid]
    reductions: dict[int, Grid]
    corrections: dict[str, Kernel]


def tables_of_rows(profile: Mapping[str, Any]) -> Measured:
    """Return the grids of a profile. Raises KeyError naming a field that a row lacks."""
    rows = {kind: profile.get(kind, []) for kind in ROW_KINDS}
    gemms = _grouped(rows["gemm"], lambda r: r["fmt"])
    casts = _grouped(
        rows["quantize"], lambda r: "dynamic" if r.get("dynamic") else "static"
    )
    reductions = _grouped(rows["all_reduce"], lambda r: r["gpus"])
    return Measured(
        gemms={f: _grid(found, ("m", "n", "k")) for f, found in gemms.items()},
        context=_sections(rows["context_attention"], "tokens"),
        generation=_sections(rows["generation_attention"], "context"),
        casts={f: _grid(found, ("rows", "columns")) for f, found in casts.items()},
        reductions={n: _grid(found, ("bytes",)) for n, found in reductions.items()},
        corrections={k: v for row in profile.get("fits", []) for k, v in _kernel(row)},
    )


def _kernel(row: Row) -> Iterator[tuple[str, Kernel]]:
    """Return a correction of the roofline as the kernel that it describes.

    Fixed + factor × the data sheet's time is a kernel that reaches 1 / factor of both
    of its limits. Two numbers need more rows than two.
    """
    part = _PARTS.get((row["kind"], row["fmt"]))
    name = row["fmt"] if row["kind"] == "gemm" else part
    if name is not None and row["rows"] >= LEAST_ROWS:
        share = 1 / row["factor"] if row["factor"] else math.inf
        yield name, Kernel(row["fixed_s"], share, share, row["residual"])


def _grouped(rows: Sequence[Row], key: Any) -> dict[Any, list[Row]]:
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _grid(rows: Sequence[Row], names: Sequence[str]) -> Grid:
    axes, seconds, spread = _arrays(rows, names)
    return grid(axes, seconds, spread)


def _sections(rows: Sequence[Row], length: str) -> dict[Layout, Section]:
    layouts = _grouped(
        rows, lambda r: (r["kv_fmt"], r["head_dim"], r.get("window") or 0)
    )
    return {layout: _section(found, length) for layout, found in layouts.items()}


def _section(rows: Sequence[Row], length: str) -> Section:
    pairs = sorted({(r["heads"], r["kv_heads"]) for r in rows})
    numbered = [{**r, "pair": pairs.index((r["heads"], r["kv_heads"]))} for r in rows]
    axes, seconds, spread = _arrays(numbered, ("pair", "batch", length))
    return Section.of(pairs, axes[1:], seconds, spread)


def _arrays(
    rows: Sequence[Row], names: Sequence[str]
) -> tuple[list[list[int]], NDArray[np.float64], NDArray[np.float64]]:
    """Return the axes, and on their crossings the seconds and spreads; NaN: no row."""
    axes = [sorted({row[name] for row in rows}) for name in names]
    shape = [len(axis) for axis in axes]
    seconds, spread = np.full(shape, np.nan), np.full(shape, np.nan)
    for row in rows:
        if not row["seconds"] > 0:
            raise HardwareError(f"a profile says that {dict(row)} took no time")
        where = tuple(axis.index(row[n]) for axis, n in zip(axes, names, strict=True))
        seconds[where], spread[where] = row["seconds"], row["spread"]
    return axes, seconds, spread
