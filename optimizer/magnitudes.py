"""How large the values of a tensor are: a histogram of |x| of fixed size, mergeable.

Eight bins to each power of two, from 2^-64 to 2^64. From it follows, for any format
and any scale, how much lies below its range, and what rounding is expected to cost.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimizer.formats import Format

PARTS = 8  # bins to a power of two
LOWEST, HIGHEST = -64, 64  # exponents; what lies beyond counts in the outermost bin
BINS = PARTS * (HIGHEST - LOWEST)

# Mean of (power of two below x / x)² for x spread evenly over an octave of logarithms.
MEAN_STEP = 0.75 / (2 * np.log(2))

Counts = NDArray[np.int64]
Values = NDArray[np.float64]


def _edges() -> Values:
    steps = np.arange(BINS + 1)
    powers = np.ldexp(1.0, steps // PARTS + LOWEST)
    return np.asarray(powers * (1 + steps % PARTS / PARTS), np.float64)


EDGES = _edges()
MIDDLES = (EDGES[:-1] + EDGES[1:]) / 2
_WIDTHS = EDGES[1:] - EDGES[:-1]
SQUARES = MIDDLES**2 + _WIDTHS**2 / 12  # mean of x² of values spread over a bin


def _no_counts() -> Counts:
    return np.zeros(BINS, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Magnitudes:
    """How many values lie in each bin. Shares are of the values that are not zero."""

    counts: Counts = field(default_factory=_no_counts)  # (BINS,)
    zeros: int = 0

    def merge(self, other: "Magnitudes") -> "Magnitudes":
        """Return both together, in either order."""
        return Magnitudes(self.counts + other.counts, self.zeros + other.zeros)

    @property
    def nonzero(self) -> int:
        """How many values are not zero."""
        return int(self.counts.sum())

    def below(self, limit: float) -> float:
        """Return the share of values with |x| < limit; inside a bin, evenly spread."""
        if not self.nonzero:
            return 0.0
        filled = np.clip((limit - EDGES[:-1]) / _WIDTHS, 0.0, 1.0)
        return float(self.counts @ filled) / self.nonzero

    def quantile(self, share: float) -> float:
        """Return the |x| below which `share` of the values lie; 0 if there are none."""
        if not self.nonzero:
            return 0.0
        wanted = share * self.nonzero
        reached = np.cumsum(self.counts)
        i = int(np.searchsorted(reached, wanted))
        before = reached[i] - self.counts[i]
        return float(EDGES[i] + _WIDTHS[i] * (wanted - before) / self.counts[i])

    def flushed(self, scale: float, fmt: Format) -> float:
        """Return the share that rounds to zero: at most half the smallest subnormal."""
        return self.below(scale * fmt.smallest_subnormal / 2)

    def subnormal(self, scale: float, fmt: Format) -> float:
        """Return the share without a full significand, what is flushed included."""
        return self.below(scale * fmt.smallest_normal)

    def sqnr_db(
        self,
        scale: float,
        fmt: Format,
        up_to: float = np.inf,
        *,
        any_alignment: bool = False,
    ) -> float:
        """Return the expected SQNR, in dB, of the values up to `up_to`.

        The error of rounding to a step is spread evenly over ± half of it: its square
        is step² / 12. What is flushed is lost whole, what saturates loses the excess.
        With `any_alignment` it does not matter whether many values happen to lie just
        above a power of two, where steps are widest: the mean over all such shifts.
        """
        counts = np.where(up_to >= MIDDLES, self.counts, 0)
        signal = float(counts @ SQUARES)
        noise = float(counts @ _squared_error(scale, fmt, any_alignment))
        return 10 * float(np.log10(signal / noise)) if signal else np.inf

    def state(self) -> dict[str, Any]:
        """Return everything as JSON: {"bins": {number: count}, "zeros": count}."""
        filled = np.flatnonzero(self.counts)
        bins = {str(i): int(self.counts[i]) for i in filled}
        return {"bins": bins, "zeros": self.zeros}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Magnitudes":
        """Inverse of `state`."""
        counts = _no_counts()
        for i, count in state["bins"].items():
            counts[int(i)] = count
        return cls(counts, state["zeros"])

    def to_json(self) -> dict[str, Any]:
        """Return {"first": exponent, "counts": one for each power of two, "zeros"}."""
        octaves = self.counts.reshape(-1, PARTS).sum(1)
        filled = np.flatnonzero(octaves)
        if not len(filled):
            return {"first": 0, "counts": [], "zeros": self.zeros}
        first, last = int(filled[0]), int(filled[-1])
        counts = octaves[first : last + 1].tolist()
        return {"first": first + LOWEST, "counts": counts, "zeros": self.zeros}


def _squared_error(scale: float, fmt: Format, any_alignment: bool) -> Values:
    """Return the expected squared error of a value in each bin."""
    x = MIDDLES / scale
    exponent = np.maximum(np.floor(np.log2(x)), fmt.min_exponent)
    error = np.ldexp(1.0, exponent.astype(int) - fmt.mantissa_bits) ** 2 / 12
    if any_alignment:
        spread = MEAN_STEP * (x * fmt.eps) ** 2 / 12
        error = np.maximum(spread, fmt.smallest_subnormal**2 / 12)
    error = np.where(x < fmt.smallest_subnormal / 2, x**2, error)
    error = np.where(x > fmt.max, (x - fmt.max) ** 2, error)
    return np.asarray(error * scale**2, np.float64)
