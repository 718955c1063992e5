"""Attention times by (heads, KV heads), each pair a grid of batch × tokens.

The pairs that were measured are no grid: 32 query heads go with 1, 2, 4, 8 or 32 KV
heads. A pair that is missing is read between those that have as many KV heads: (28, 4)
between (24, 4) and (32, 4). Else between those in which as many query heads share one:
(20, 20) between (16, 16) and (24, 24). Else between two rows of the first kind: (9, 3)
between (9, 2) and (9, 4). Else of fewer heads at a larger batch: (32, 32) at batch 1 is
(8, 8) at batch 4, the same products and bytes in as many tiles. Each has an error, from
pairs that were measured and can be told from others the same way.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from optimizer.grid import Grid, Reading, grid, median_error

Pair = tuple[int, int]  # query heads, KV heads
Shares = tuple[tuple[Pair, float], ...]
Lines = Callable[[Sequence[Pair]], list[list[Pair]]]


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """The times of one cache format, head size and window."""

    grids: Mapping[Pair, Grid]
    errors: tuple[float, float]  # between pairs: of one row, and of one ratio
    mixes: dict[Pair, tuple[Shares, float]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        pairs: Sequence[Pair],
        axes: Sequence[Sequence[int]],
        seconds: NDArray[np.float64],
        spread: NDArray[np.float64] | None = None,
        errors: Sequence[float] | None = None,
    ) -> Self:
        """Return the section of an array of pairs × batch × tokens.

        `errors` are those of a row, of a ratio, of batch and of tokens, where they are
        known already.
        """
        if errors is None:
            inner = grid([range(len(pairs)), *axes], seconds).errors[1:]
            bare = _grids(pairs, axes, seconds, None, inner)
            between = [median_error(_told(bare, n)) for n in (_rows, _diagonals)]
            errors = (*between, *inner)
        grids = _grids(pairs, axes, seconds, spread, errors[2:])
        return cls(grids, (errors[0], errors[1]))

    @property
    def all_errors(self) -> list[float]:
        """What `of` takes as errors."""
        return [*self.errors, *next(iter(self.grids.values())).errors]

    def at(self, heads: int, kv_heads: int, batch: int, tokens: int) -> Reading | None:
        """Return the time; None where neither the pair nor others tell it."""
        for n in range(1, kv_heads + 1):
            if heads % n == kv_heads % n == 0:
                found = self._read(heads // n, kv_heads // n, batch * n, tokens)
                if found is not None:
                    return found if n == 1 else self._folded(found)
        return None

    def _folded(self, reading: Reading) -> Reading | None:
        error = math.hypot(reading.error, _fold_error(self))
        return None if math.isnan(error) else Reading(reading.seconds, error)

    def _read(
        self, heads: int, kv_heads: int, batch: int, tokens: int
    ) -> Reading | None:
        pair = (heads, kv_heads)
        if pair not in self.mixes:  # a model asks for one pair many times
            self.mixes[pair] = _mix(self, pair)
        shares, error = self.mixes[pair]
        if not shares or math.isnan(error):
            return None
        readings = [self.grids[p].at(batch, tokens) for p, _ in shares]
        if any(r is None for r in readings):
            return None
        known = [r for r in readings if r is not None]
        total = sum(r.seconds * w for r, (_, w) in zip(known, shares, strict=True))
        return Reading(total, math.hypot(error, max(r.error for r in known)))

    def leave_one_out(self) -> NDArray[np.float64]:
        """Return the relative errors along every axis, pairs included."""
        inner = [g.leave_one_out(i) for g in self.grids.values() for i in (0, 1)]
        between = [_told(self.grids, lines) for lines in (_rows, _diagonals)]
        return np.concatenate([*inner, *between])


def _grids(
    pairs: Sequence[Pair],
    axes: Sequence[Sequence[int]],
    seconds: NDArray[np.float64],
    spread: NDArray[np.float64] | None,
    errors: Sequence[float],
) -> dict[Pair, Grid]:
    shared = tuple(tuple(a) for a in axes)
    spreads = [None] * len(pairs) if spread is None else list(spread)
    return {
        pair: Grid(shared, times, known, tuple(errors))
        for pair, times, known in zip(pairs, seconds, spreads, strict=True)
    }


def _rows(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Return the pairs with equal KV heads, by query heads."""
    return [
        sorted(p for p in pairs if p[1] == kv) for kv in sorted({p[1] for p in pairs})
    ]


def _diagonals(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Return the pairs with as many query heads to a KV head, by query heads."""
    ratios = sorted({p[0] / p[1] for p in pairs})
    return [sorted(p for p in pairs if p[0] / p[1] == r) for r in ratios]


def _told(grids: Mapping[Pair, Grid], lines: Lines) -> NDArray[np.float64]:
    """Return the leave-one-out errors of each pair from its neighbors on a line."""
    found = []
    for line in lines(list(grids)):
        if len(line) > 2:
            stack = np.stack([grids[p].seconds for p in line])
            first = grids[line[0]]
            whole = Grid((tuple(p[0] for p in line), *first.axes), stack)
            found.append(whole.leave_one_out(0))
    return np.concatenate(found) if found else np.empty(0)


@cache
def _fold_error(section: Section) -> float:
    """Return the median error of folding two into one, over all that were measured."""
    found = []
    for (heads, kv_heads), halved in section.grids.items():
        whole = section.grids.get((2 * heads, 2 * kv_heads))
        if whole is not None:
            batches = halved.axes[0]
            once = [i for i, b in enumerate(batches) if 2 * b in batches]
            twice = [batches.index(2 * batches[i]) for i in once]
            found.append(halved.seconds[twice] / whole.seconds[once] - 1)
    errors = np.concatenate([np.empty(0), *(f.ravel() for f in found)])
    return median_error(errors[~np.isnan(errors)])


def _on(line: Sequence[Pair], heads: int) -> Shares:
    """Return the shares of the two pairs of a line around a number of query heads."""
    i = bisect_left([p[0] for p in line], heads)
    if i < len(line) and line[i][0] == heads:
        return ((line[i], 1.0),)
    if i == 0 or i == len(line):
        return ()
    upper = (heads - line[i - 1][0]) / (line[i][0] - line[i - 1][0])
    return ((line[i - 1], 1 - upper), (line[i], upper))


def _mix(section: Section, pair: Pair) -> tuple[Shares, float]:
    """Return which measured pairs stand for this one, and the error of that."""
    if pair in section.grids:
        return ((pair, 1.0),), 0.0
    heads, kv_heads = pair
    pairs = list(section.grids)
    row = next((r for r in _rows(pairs) if r[0][1] == kv_heads), [])
    if shares := _on(row, heads):
        return shares, section.errors[0]
    ratio = next(
        (d for d in _diagonals(pairs) if d[0][0] * kv_heads == heads * d[0][1]), []
    )
    if shares := _on(ratio, heads):
        return shares, section.errors[1]
    rows = [(r[0][1], _on(r, heads)) for r in _rows(pairs)]
    below = [(kv, s) for kv, s in rows if s and kv < kv_heads]
    above = [(kv, s) for kv, s in rows if s and kv > kv_heads]
    if not below or not above:
        return (), math.nan
    (low, under), (high, over) = below[-1], above[0]
    upper = (kv_heads - low) / (high - low)
    shares = (
        *((p, w * (1 - upper)) for p, w in under),
        *((p, w * upper) for p, w in over),
    )
    return shares, math.hypot(*section.errors)
