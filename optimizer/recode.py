"""A stack's FP8 weights rounded with their errors fed forward, layer by layer.

The same pass counts what errors of the inputs cost, and fits their static scales.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimizer.compensate import CompensatedCodes, Key, Rounded, compensate
from optimizer.execute import Amaxes, WeightCodes
from optimizer.formats import FORMATS
from optimizer.hessians import FisherHessians, key_of
from optimizer.model import LoadedModel
from optimizer.scales import FittedCodes
from optimizer.sensitivity import Seen, Sweep, walk_back
from optimizer.sites import LinearPart
from optimizer.stack import (
    LINEAR,
    WHOLE_MODEL,
    Granularity,
    Precision,
    Site,
    Stack,
)
from optimizer.static_scales import Costs, Place, fitted, scaled, static_places
from optimizer.walk import Told, silent

NO_AMAXES: Amaxes = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Gain:
    """What compensation gained at the matrices, on the calibration data.

    Mean squared errors of their outputs, tokens weighed by what they cost, summed
    over outputs and matrices. On other data the gain is smaller: go by the KL.
    """

    matrices: int
    loss: float
    nearest_loss: float
    static_scales: Mapping[str, Any]  # ratios to amax's where not 1, by place


class Recoded(NamedTuple):
    """What a stack runs with instead of weights rounded to nearest and plain scales."""

    weights: WeightCodes
    gain: Gain
    amaxes: Amaxes  # what the fitted static scales are made from


def recode(
    model: LoadedModel,
    sequences: Sequence[Tensor],
    stack: Stack,
    progress: Told = silent,
    seed: int = 0,
    amaxes: Amaxes = NO_AMAXES,
) -> Recoded:
    """Compensate the FP8 matrices of a stack, and fit the static scales of `amaxes`.

    One pass forward and one back over `sequences` of ids (1, tokens): tokens weigh
    what an error of theirs costs in KL. When all have passed a stage, its matrices
    are rounded, each row under the scale that loses least, and what the stage has
    seen is forgotten.
    """
    executor = _Recoding(model, stack, amaxes)
    walk_back(model, dict(enumerate(sequences)), executor, seed=seed, progress=progress)
    made = executor.made
    gain = Gain(
        matrices=len(made),
        loss=sum(m.loss for m in made.values()),
        nearest_loss=sum(m.nearest_loss for m in made.values()),
        static_scales={
            f"{site} {role}": ratio.tolist()
            for (site, role), ratio in sorted(executor.ratios.items())
        },
    )
    fitted_to = scaled(amaxes, executor.ratios)
    return Recoded(CompensatedCodes(model, made), gain, fitted_to)


class _Recoding(Sweep):
    """Runs the reference with gradients and rounds each stage's matrices at its end."""

    def __init__(self, model: LoadedModel, stack: Stack, amaxes: Amaxes) -> None:
        super().__init__(model, {}, amaxes, WeightCodes(model))
        self._all = rounded_sites(stack)
        self._fisher = FisherHessians(self._all)
        self._fitted = FittedCodes(model, self._fisher)
        self._static = static_places(stack, amaxes)
        self._wanted = {place: (p,) for place, p in self._static.items()}
        self._costs: dict[Place, Costs] = {}  # of the stage that runs
        self.made: dict[Key, Rounded] = {}
        self.ratios: dict[Place, Tensor] = {}

    def linear(self, part: LinearPart, x: Tensor) -> Tensor:
        """Run in fp32; see the input when the gradient of the output comes back."""
        y = super().linear(part, x)
        if self._fisher.wants(part):
            rows = x.detach()
            y.register_hook(lambda g: self._fisher.weigh(part, rows, g))
        return y

    @torch.no_grad()
    def _score(self, seen: Seen) -> None:
        """Count what errors of a tensor under a static scale cost."""
        x, squared = seen.x, seen.squared
        if seen.visible is not None:
            x = x.masked_fill(~seen.visible, 0.0)
        by_head = self._static[seen.place].granularity is Granularity.HEAD
        heads = x.shape[1] if by_head else 0
        self._costs.setdefault(seen.place, Costs(heads)).add(x, squared)

    @torch.no_grad()
    def leave(self, stage: int) -> None:
        """Round the matrices of the stage, while its weights are still there."""
        for site, precision in self._all.items():
            if _stage(self._model, site) == stage:
                parts = self._model.parts[site]
                self.made |= compensate(parts, self._fisher, precision, self._fitted)
                for part in parts:
                    self._fisher.drop(key_of(part))
        for place, costs in self._costs.items():
            ratio = fitted(costs, self._static[place], self._amaxes[place])
            if bool((ratio != 1).any()):
                self.ratios[place] = ratio
        self._costs.clear()
        super().leave(stage)


def rounded_sites(stack: Stack) -> dict[Site, Precision]:
    """Return the matrices of a stack that have a narrow weight, and which."""
    return {
        site: choice.weight
        for site, choice in stack.choices.items()
        if site.component in LINEAR
        and choice.weight is not None
        and FORMATS[choice.weight.format].scaled
    }


def _stage(model: LoadedModel, site: Site) -> int:
    return model.stages - 1 if site.layer == WHOLE_MODEL else site.layer + 1
