"""Does a run leave the baseline, and by more than another order of the data would?

Two figures of each layer are compared with the first fp32 run's: the norm of its
gradient, summed over the steps, and how far its weights moved in the end. The second
fp32 run, on the same samples in another order, says how much either changes by itself:
the noise floor. A layer drifts if one of them is off by more than 1 % and by more than
the floor.

    deviation = Σ‖g‖ of the candidate / Σ‖g‖ of the baseline - 1

Its interval is a bootstrap over blocks of steps, the same blocks of both runs.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimizer.training.trainer import Figures

SAFE = 0.01  # within 1 % of the baseline a layer is safe
CONFIDENCE = 0.95
SAMPLES = 500  # of the bootstrap
BLOCKS = 10  # that the steps are cut into

Values = NDArray[np.float64]
_LAYER = re.compile(r"^(.*?\.\d+)\.")


def layer_of(name: str) -> str:
    """Return the layer of a parameter or a module: up to its first number.

    Example: model.layers.3.mlp.up_proj.weight -> model.layers.3; what has no number is
    its module: model.embed_tokens.weight -> model.embed_tokens.
    """
    found = _LAYER.match(name + ".")
    return found[1] if found else name.removesuffix(".weight").removesuffix(".bias")


def layers(names: Iterable[str]) -> list[str]:
    """Return the layers of parameters, in their order."""
    return list(dict.fromkeys(layer_of(name) for name in names))


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far a figure of a layer is from the baseline's, relative to it.

    `floor` is what another order of the data alone makes of it. Figures that are not
    finite are infinitely far.
    """

    value: float
    low: float
    high: float
    floor: float

    @property
    def drifts(self) -> bool:
        """Whether it is beyond 1 %, and beyond the floor, with its whole interval."""
        limit = max(SAFE, self.floor)
        nearest = (
            0.0 if self.low <= 0 <= self.high else min(abs(self.low), abs(self.high))
        )
        return bool(nearest > limit)

    def to_json(self) -> dict[str, Any]:
        """Return JSON; what is not finite is null."""
        plain = {k: getattr(self, k) for k in ("value", "low", "high", "floor")}
        finite = {k: v if math.isfinite(v) else None for k, v in plain.items()}
        return {**finite, "drifts": self.drifts}


@dataclass(frozen=True, slots=True)
class LayerDrift:
    """One layer of a candidate beside the baseline."""

    layer: str
    gradient_norm: Deviation
    moved: Deviation  # how far the weights came

    @property
    def drifts(self) -> bool:
        """Whether the layer leaves the baseline."""
        return self.gradient_norm.drifts or self.moved.drifts

    @property
    def worst(self) -> float:
        """The larger of the two deviations."""
        return max(abs(self.gradient_norm.value), abs(self.moved.value))

    def to_json(self) -> dict[str, Any]:
        """Return JSON."""
        return {
            "layer": self.layer,
            "gradient_norm": self.gradient_norm.to_json(),
            "moved": self.moved.to_json(),
            "drifts": self.drifts,
        }


def drift(
    baseline: Figures, again: Figures, candidate: Figures, seed: int = 0
) -> list[LayerDrift]:
    """Return every layer of a candidate beside the baseline, in the model's order.

    `again` is the second run in fp32, on the data in another order.
    """
    names = layers(baseline.norms)
    norms = [norms_by_layer(f.norms) for f in (baseline, again, candidate)]
    moved = [_moved(f) for f in (baseline, again, candidate)]
    noise_of_norms = _pooled(
        [_ratio(norms[1][n].sum(), norms[0][n].sum()) for n in names]
    )
    noise_of_moves = _pooled([_ratio(moved[1][n], moved[0][n]) for n in names])
    found = []
    for index, name in enumerate(names):
        norm = _bootstrap(
            norms[2].get(name), norms[0][name], seed, noise_of_norms[index]
        )
        came = _ratio(moved[2].get(name, math.nan), moved[0][name])
        move = Deviation(came, came, came, noise_of_moves[index])
        found.append(LayerDrift(name, norm, move))
    return found


def _pooled(noise: Sequence[float]) -> list[float]:
    """Return the floor of each layer: its own, or the median one where that is larger.

    One pair of runs may agree in a layer by chance; all layers do not.
    """
    sizes = [abs(value) for value in noise]
    usual = float(np.median(sizes)) if sizes else 0.0
    return [max(size, usual) for size in sizes]


def norms_by_layer(norms: Mapping[str, Sequence[float]]) -> dict[str, Values]:
    """Return the norm of each layer's gradient in every step."""
    squares: dict[str, Values] = {}
    for name, values in norms.items():
        layer = layer_of(name)
        squares[layer] = squares.get(layer, np.zeros(())) + np.square(values)
    return {layer: np.sqrt(total) for layer, total in squares.items()}


def _moved(figures: Figures) -> dict[str, float]:
    squares: dict[str, float] = {}
    for name, value in figures.moved.items():
        squares[layer_of(name)] = squares.get(layer_of(name), 0.0) + value**2
    return {layer: math.sqrt(total) for layer, total in squares.items()}


def _ratio(value: float, base: float) -> float:
    """Return how far a figure is from its base; inf where that cannot be said."""
    if not (math.isfinite(value) and math.isfinite(base)):
        return math.inf
    if base == 0:
        return 0.0 if value == 0 else math.inf
    return value / base - 1


def _bootstrap(
    values: Values | None, base: Values, seed: int, floor: float
) -> Deviation:
    """Return the deviation of the sums over the steps that both runs have."""
    steps = 0 if values is None else min(len(values), len(base))
    if values is None or steps == 0:
        return Deviation(math.inf, math.inf, math.inf, floor)
    values, base = values[:steps], base[:steps]
    value = _ratio(float(values.sum()), float(base.sum()))
    if not math.isfinite(value):
        return Deviation(value, value, value, floor)
    blocks = np.array_split(np.arange(steps), min(BLOCKS, steps))
    sums = np.array([[values[b].sum(), base[b].sum()] for b in blocks])
    drawn = np.random.default_rng(seed).integers(len(sums), size=(SAMPLES, len(sums)))
    totals = sums[drawn].sum(axis=1)
    ratios = totals[:, 0] / np.where(totals[:, 1] == 0, np.nan, totals[:, 1]) - 1
    edge = (1 - CONFIDENCE) / 2
    low, high = np.nanquantile(ratios, [edge, 1 - edge])
    return Deviation(value, float(low), float(high), floor)
