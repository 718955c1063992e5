"""Which scale of a matrix: amax / max maps the largest value exactly, seldom the best.

The numbers of a floating-point format lie in a pattern that repeats with every power
of two, and a scale decides where in it each value lands. Between one power of two
and the next, each row of a matrix has a scale under which the values that matter most
land near numbers of the format. FP8 has range to spare, so nothing is lost at its
ends; of narrower formats a ratio below 1 clips what few values hold, for all others.
A ratio is taken where it gains on measured values, and stays 1 where it does not.
`static_scales` does the same for the inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optimizer.execute import Operand, WeightCodes
from optimizer.formats import FORMATS, Format
from optimizer.hessians import Hessians, key_of
from optimizer.model import LoadedModel
from optimizer.quantize import fake_quantize, quantize
from optimizer.sites import LinearPart
from optimizer.stack import Granularity, Precision

PARTS = 16  # ratios to a power of two: with 6, half of the gain was found
WEIGHT_RATIOS = tuple(2.0 ** (i / PARTS) for i in range(-3, PARTS) if i)
LEAST_GAIN = 0.02  # of the squared error: less is no gain that other data would show


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A scale, and what it is of the one that amax gives."""

    scale: Tensor  # the shape of the scale given
    ratio: Tensor  # 1 where no other gains; below 1 it clips
    gain: float  # share of the squared error that it saves, over the whole tensor


def weight_scale(
    weight: Tensor,
    scale: Tensor,
    fmt: Format,
    importance: Tensor | None = None,
    ratios: Sequence[float] = WEIGHT_RATIOS,
) -> Found:
    """Choose the ratio of each scale, () or (out, 1), of a matrix (out, in).

    What it lowers is Σ importance × error², with the mean square of each input (in,)
    as its importance: the diagonal of the Hessian.
    """

    def losses(ratio: float) -> Tensor:
        error = (weight - fake_quantize(weight, scale * ratio, fmt)).square_()
        if importance is not None:
            error.mul_(importance)
        return error.sum(-1, keepdim=True) if scale.ndim else error.sum()

    whole = losses(1.0)
    every = torch.stack([whole * (1 - LEAST_GAIN), *map(losses, ratios)])
    best, index = every.min(0)
    ratio = torch.tensor([1.0, *ratios])[index]
    best = torch.where(ratio == 1, whole, best)
    return Found(scale * ratio, ratio, _gain(float(whole.sum()), float(best.sum())))


def _gain(whole: float, best: float) -> float:
    return 1 - best / whole if whole else 0.0


class FittedCodes(WeightCodes):
    """The rounded matrices of a model, each row under the scale that loses least.

    Only scales per channel are fitted: one for a whole matrix has nothing to gain in
    FP8, for its values lie all over the pattern.
    """

    def __init__(self, model: LoadedModel, hessians: Hessians) -> None:
        super().__init__(model)
        self._hessians = hessians
        self.found: dict[
            tuple[str, Precision], Found
        ] = {}  # scales, and what they gain

    def _round(self, part: LinearPart, precision: Precision) -> Operand:
        codes, scale = super()._round(part, precision)
        seen = self._hessians.seen(key_of(part)) > 0
        if (
            scale is None
            or precision.granularity is not Granularity.CHANNEL
            or not seen
        ):
            return codes, scale
        key = (part.name, precision)
        fmt, weight = FORMATS[precision.format], part.weight.contiguous()
        if key not in self.found:
            hessian = self._hessians.hessian(key_of(part))
            importance = hessian.diagonal().float()
            self.found[key] = weight_scale(weight, scale, fmt, importance)
        scale = self.found[key].scale
        return quantize(weight, scale, fmt), scale
