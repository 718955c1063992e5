"""How many different inputs a format puts on one value."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from optimizer.statistics import sampled_rows

COLLAPSE_ROWS = 4  # of one tensor
COLLAPSE_SEQUENCES = 4  # the first ones of a sweep, that all workers number alike


@dataclass(slots=True)
class Collapse:
    """How many different inputs of a row end on one value, summed over sampled rows.

    A row is one token's vector, or one output row of a matrix: what shares a scale
    under every granularity. Rows are few and evenly spaced, so that the figure costs
    next to nothing; the same data give the same rows.
    """

    rows: int = 0
    inputs: int = 0  # different inputs
    values: int = 0  # different values after rounding
    pairs: int = 0  # of different inputs
    joined: int = 0  # of them: those that got one value

    @property
    def share(self) -> float:
        """Share of the different inputs that lost a value of their own: 0 to 1."""
        return 1 - self.values / self.inputs if self.inputs else 0.0

    @property
    def pair_share(self) -> float:
        """Chance that two different inputs of a row got one value: 0 to 1.

        Unlike `share` it does not grow with the length of the row.
        """
        return self.joined / self.pairs if self.pairs else 0.0

    def merge(self, other: "Collapse") -> "Collapse":
        """Return both together, in either order."""
        return Collapse(
            self.rows + other.rows,
            self.inputs + other.inputs,
            self.values + other.values,
            self.pairs + other.pairs,
            self.joined + other.joined,
        )

    def add(
        self, seen: "SampledRows", codes: Tensor, scale: Tensor | None = None
    ) -> None:
        """Count rows of a tensor, and of the codes (..., n) that it became.

        `scale` is asked for only where values of one row have different ones.
        """
        if scale is not None and scale.ndim and scale.shape[-1] > 1:
            codes = codes * scale
        after = SampledRows.of(codes, seen.asked)
        self.rows += seen.rows
        self.inputs += seen.values
        self.values += after.values
        self.pairs += seen.pairs - seen.equal
        self.joined += after.equal - seen.equal


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What a few rows of a tensor hold."""

    asked: int  # rows; there may be fewer
    rows: int
    values: int  # different ones
    pairs: int
    equal: int  # of the pairs

    @classmethod
    def of(cls, x: Tensor, count: int = COLLAPSE_ROWS) -> "SampledRows":
        """Look at `count` evenly spaced rows of `x` (..., n), or all if it has fewer."""
        if x.numel() == 0:
            return cls(count, 0, 0, 0, 0)
        n = x.shape[-1]
        rows = sampled_rows(x.detach(), count * n)[:count]
        values, equal = _runs(rows)
        return cls(count, len(rows), values, len(rows) * (n * (n - 1) // 2), equal)


def _runs(rows: Tensor) -> tuple[int, int]:
    """Return how many different values the rows (r, n) hold, and how many equal pairs."""
    # numpy sorts float32 in vector registers: a tenth of the time that torch takes.
    ordered = np.sort(rows.numpy(), axis=-1)
    first = np.ones(ordered.shape, dtype=bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    lengths = np.diff(np.flatnonzero(first), append=first.size)
    return len(lengths), int((lengths * (lengths - 1) // 2).sum())


def collapsed_share(x: Tensor, codes: Tensor) -> float:
    """Return the share of a row's different inputs that lost a code of their own.

    1 - different codes / different inputs, over up to `COLLAPSE_ROWS` evenly
    spaced rows of `x` (..., n): 0 where every input kept a code of its own, near 1
    where all share a few. Example: x [[1, 1.01, 2, 2]], codes [[1, 1, 2, 2]] -> 1/3.
    """
    seen = Collapse()
    seen.add(SampledRows.of(x), codes)
    return seen.share
