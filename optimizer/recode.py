"""A stack's FP8 weights rounded with their errors fed forward, layer by layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optimizer.compensate import CompensatedCodes, Key, Rounded, compensate
from optimizer.execute import WeightCodes
from optimizer.formats import FORMATS
from optimizer.hessians import FisherHessians, key_of
from optimizer.model import LoadedModel
from optimizer.scales import FittedCodes
from optimizer.sensitivity import Sweep, walk_back
from optimizer.sites import LinearPart
from optimizer.stack import LINEAR, WHOLE_MODEL, Precision, Site, Stack
from optimizer.walk import Told, silent


@dataclass(frozen=True, slots=True)
class Gain:
    """What compensation gained at the matrices, on the calibration data.

    Mean squared errors of their outputs, tokens weighed by what they cost, summed
    over outputs and matrices. On other data the gain is smaller: go by the KL.
    """

    matrices: int
    loss: float
    nearest_loss: float


def recode(
    model: LoadedModel,
    sequences: Sequence[Tensor],
    stack: Stack,
    progress: Told = silent,
    seed: int = 0,
) -> tuple[WeightCodes, Gain]:
    """Return the codes of a stack whose FP8 matrices are compensated, and the gain.

    One pass forward and one back over `sequences` of ids (1, tokens): tokens weigh
    what an error of theirs costs in KL. When all have passed a stage, its matrices
    are rounded, each row under the scale that loses least, and what the stage has
    seen is forgotten.
    """
    executor = _Recoding(model, rounded_sites(stack))
    walk_back(model, dict(enumerate(sequences)), executor, seed=seed, progress=progress)
    made = executor.made
    gain = Gain(
        matrices=len(made),
        loss=sum(m.loss for m in made.values()),
        nearest_loss=sum(m.nearest_loss for m in made.values()),
    )
    return CompensatedCodes(model, made), gain


class _Recoding(Sweep):
    """Runs the reference with gradients and rounds each stage's matrices at its end."""

    def __init__(self, model: LoadedModel, wanted: Mapping[Site, Precision]) -> None:
        super().__init__(model, {}, {}, WeightCodes(model))
        self._all = wanted
        self._fisher = FisherHessians(wanted)
        self._fitted = FittedCodes(model, self._fisher)
        self.made: dict[Key, Rounded] = {}

    def linear(self, part: LinearPart, x: Tensor) -> Tensor:
        """Run in fp32; see the input when the gradient of the output comes back."""
        y = super().linear(part, x)
        if self._fisher.wants(part):
            rows = x.detach()
            y.register_hook(lambda g: self._fisher.weigh(part, rows, g))
        return y

    @torch.no_grad()
    def leave(self, stage: int) -> None:
        """Round the matrices of the stage, while its weights are still there."""
        for site, precision in self._all.items():
            if _stage(self._model, site) == stage:
                parts = self._model.parts[site]
                self.made |= compensate(parts, self._fisher, precision, self._fitted)
                for part in parts:
                    self._fisher.drop(key_of(part))


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
