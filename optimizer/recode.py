"""A stack's FP8 weights rounded with their errors fed forward, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from optimizer.compensate import CompensatedCodes, Key, Rounded, compensate
from optimizer.execute import WeightCodes
from optimizer.formats import FORMATS
from optimizer.hessians import Hessians, key_of
from optimizer.model import LoadedModel
from optimizer.stack import LINEAR, WHOLE_MODEL, Precision, Site, Stack
from optimizer.walk import Activations, Told, silent, walk


@dataclass(frozen=True, slots=True)
class Gain:
    """What compensation gained at the matrices, on the calibration data.

    Mean squared errors of their outputs, summed over outputs and matrices.
    """

    matrices: int
    loss: float
    nearest_loss: float


def recode(
    model: LoadedModel,
    sequences: Sequence[Tensor],
    stack: Stack,
    progress: Told = silent,
) -> tuple[WeightCodes, Gain]:
    """Return the codes of a stack whose FP8 matrices are compensated, and the gain.

    One pass of the reference over `sequences` of ids (1, tokens): when all of them
    have passed a layer, its matrices are rounded and what it has seen is forgotten.
    """
    wanted = rounded_sites(stack)
    hessians = Hessians(wanted)
    weights = WeightCodes(model)
    made: dict[Key, Rounded] = {}

    def after(stage: int, index: int, out: Tensor) -> None:
        if index < len(sequences) - 1:
            return
        for site, precision in wanted.items():
            if _stage(model, site) == stage:
                parts = model.parts[site]
                made.update(compensate(parts, hessians, precision, weights))
                for part in parts:
                    hessians.drop(key_of(part))

    walk(
        model,
        sequences,
        hessians,
        kept=Activations(),
        after=after,
        keep_all=False,
        progress=progress,
    )
    gain = Gain(
        matrices=len(made),
        loss=sum(m.loss for m in made.values()),
        nearest_loss=sum(m.nearest_loss for m in made.values()),
    )
    return CompensatedCodes(model, made), gain


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
