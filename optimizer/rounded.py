"""What a rounding does to a tensor, counted: signal, noise, saturated, flushed, collapsed."""

from dataclasses import dataclass

from torch import Tensor

from optimizer.collapse import SampledRows
from optimizer.execute import Operand
from optimizer.formats import FORMATS
from optimizer.quantize import saturated_share
from optimizer.stack import Granularity, Precision
from optimizer.sums import Rounding
from optimizer.totals import sum_of, sum_of_squares

# The scales of these are rounded, also down. Others of a group, row or head come from
# the largest value that they cover: nothing lies beyond the format, by construction.
SATURATING = frozenset({Granularity.MX, Granularity.NV})
ROUNDED = 1e-6  # relative: what making and undoing a float32 scale may move a value


@dataclass(frozen=True, slots=True)
class Whole:
    """What every rounding of a tensor is compared with."""

    x: Tensor
    signal: float  # Σ x²
    nonzero: int
    largest: float  # |x|
    rows: SampledRows | None  # None: not asked for

    @classmethod
    def of(cls, x: Tensor, rows: SampledRows | None) -> "Whole":
        """Sum up a tensor, once for all its roundings."""
        low, high = x.aminmax()
        return cls(
            x=x,
            rows=rows,
            signal=sum_of_squares(x),
            nonzero=int(x.count_nonzero()),
            largest=max(-float(low), float(high)),
        )


def squared_error(x: Tensor, operand: Operand) -> Tensor:
    """Return δ² of a tensor and what it was rounded to."""
    codes, scale = operand
    error = codes - x if scale is None else (codes * scale).sub_(x)
    return error.square_()


def count(
    sums: Rounding, whole: Whole, operand: Operand, error: Tensor, precision: Precision
) -> None:
    """Add one tensor, rounded to `precision` with the error δ², to the running sums."""
    codes, scale = operand
    sums.signal += whole.signal
    sums.noise += sum_of(error)
    sums.count += codes.numel()
    if whole.rows is not None:
        sums.collapse.add(whole.rows, *operand)
    if scale is not None:  # what has no scale has fp32's range, or nearly
        sums.flushed += whole.nonzero - int(codes.count_nonzero())
        fmt = FORMATS[precision.format]
        limit = fmt.max * (1 + ROUNDED)
        beyond = scale.numel() == 1 and whole.largest > limit * float(scale)
        if beyond or precision.granularity in SATURATING:
            share = saturated_share(whole.x, scale, fmt)
            sums.saturated += round(share * codes.numel())
