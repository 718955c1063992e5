"""How to scale the loss: from the exponents of fp32's gradients, and from the fp16 run.

A scale is safe between two ends. Below the lower one more than 1 % of a matrix's
gradients vanish in fp16; above the upper one the largest leaves its range.
"""

import math
from dataclasses import asdict, replace
from typing import Any

from optimizer.advice import LossScaling
from optimizer.formats import FP16
from optimizer.training.candidates import Arithmetic
from optimizer.training.exponents import HIGHEST, LOWEST, Seen
from optimizer.training.probe import Probed
from optimizer.training.trainer import Figures

MOST_FLUSHED = 0.01
ROLES = ("gradient", "input_gradient", "weight_gradient")


def window(figures: Figures) -> tuple[float, float] | None:
    """Return the smallest and the largest safe power of two; None: no gradients."""
    every = [
        seen
        for roles in figures.seen.values()
        for role, seen in roles.items()
        if role in ROLES and seen.amax > 0
    ]
    if not every:
        return None
    largest = max(seen.amax for seen in every)
    high = math.floor(math.log2(FP16.max / largest))
    low = max(_least(seen) for seen in every)
    return 2.0**low, 2.0**high


def _least(seen: Seen) -> int:
    """Return the exponent of the smallest scale that flushes no more than 1 %."""
    vanish = round(math.log2(FP16.smallest_subnormal / 2))
    nonzero = max(sum(seen.counts), 1)
    for exponent in range(LOWEST, HIGHEST + 1):
        if seen.below(exponent + 1) > MOST_FLUSHED * nonzero:
            return vanish - exponent
    return 0


def settings(found: Probed) -> dict[str, Any]:
    """Return the settings of fp16's loss scaling, and what they follow from."""
    ends = window(found.baseline)
    usual = LossScaling()
    needed = found.chosen is not None and (
        found.chosen.candidate.arithmetic is Arithmetic.FP16
    )
    if ends is None:
        return {"needed": needed, **asdict(usual), "window": None}
    low, high = ends
    initial = min(usual.initial, high)
    return {
        "needed": needed,
        **asdict(replace(usual, initial=initial)),
        "window": {"low": low, "high": high, "empty": low > high},
    }
