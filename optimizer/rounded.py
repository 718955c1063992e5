"""What a rounding does to a tensor, counted: signal, noise, saturated, flushed, collapsed."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from optimizer import matmul
from optimizer.collapse import SampledRows
from optimizer.execute import Operand
from optimizer.formats import FORMATS
from optimizer.quantize import saturated_share
from optimizer.stack import Granularity, Precision
from optimizer.sums import Rounding
from optimizer.totals import sum_of_squares

# The scales of these are rounded, also down. Others of a group, row or head come from
# the largest value that they cover: nothing lies beyond the format, by construction.
SATURATING = frozenset({Granularity.MX, Granularity.NV})
ROUNDED = 1e-6  # relative: what making and undoing a float32 scale may move a value
# What products on bf16 units may move it beyond what calibration saw. Half a step of
# e4m3 at its largest number is twice as much: nothing is lost by that.
ROUGHLY = 2.0**-6


@dataclass(frozen=True, eq=False)
class Whole:
    """What every rounding of a tensor is compared with; each figure made when asked for."""

    x: Tensor
    sampled: int  # rows that are looked at closely; 0: none

    @cached_property
    def signal(self) -> float:
        """Σ x²."""
        return sum_of_squares(self.x)

    @cached_property
    def nonzero(self) -> int:
        """How many elements are not 0."""
        return int(self.x.count_nonzero())

    @cached_property
    def largest(self) -> float:
        """The largest |x|."""
        low, high = self.x.aminmax()
        return max(-float(low), float(high))

    @cached_property
    def rows(self) -> SampledRows:
        """A few rows, as they were."""
        return SampledRows.of(self.x, self.sampled)


def rounding_error(x: Tensor, operand: Operand) -> Tensor | None:
    """Return δ of a tensor and what it was rounded to; None: it is its own rounding."""
    codes, scale = operand
    if codes is x and scale is None:
        return None
    return codes - x if scale is None else (codes * scale).sub_(x)


def count(
    sums: Rounding,
    whole: Whole,
    operand: Operand,
    error: Tensor | None,
    precision: Precision,
) -> None:
    """Add one tensor, rounded to `precision` with the error δ, to the running sums."""
    codes, scale = operand
    sums.signal += whole.signal
    sums.noise += 0.0 if error is None else sum_of_squares(error)
    sums.count += codes.numel()
    if whole.sampled:
        sums.collapse.add(whole.rows, *operand)
    if scale is not None:  # what has no scale has fp32's range, or nearly
        sums.flushed += whole.nonzero - int(codes.count_nonzero())
        fmt = FORMATS[precision.format]
        exact = matmul.MATMUL_PRECISION == "ieee"
        limit = fmt.max * (1 + (ROUNDED if exact else ROUGHLY))
        beyond = scale.numel() == 1 and whole.largest > limit * float(scale)
        if beyond or precision.granularity in SATURATING:
            share = saturated_share(whole.x, scale, fmt)
            sums.saturated += round(share * codes.numel())
