"""A stack on a real device, held against its emulation, and how long it takes there.

The emulation drives: it runs the stack as everywhere else, and at every matrix that the
device's kernels take the same bf16 input goes to the device as well. What comes back is
compared site by site. Attention and activation functions stay emulated.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from optimizer import scaled_mm, te
from optimizer.errors import HardwareError
from optimizer.execute import Amaxes, Operand, Stacked, WeightCodes
from optimizer.formats import BF16, FORMATS
from optimizer.model import LoadedModel
from optimizer.quantize import round_to_format, scale_from_amax
from optimizer.sites import LinearPart
from optimizer.stack import Choice, Component, Granularity, Role, Site, Stack


class Kernels(Protocol):
    """What multiplies on a device."""

    name: str

    def takes(self, component: Component, choice: Choice) -> bool:
        """Whether a linear choice runs there."""

    def linear(self, part: LinearPart, x: Tensor, choice: Choice) -> Tensor:
        """Return x Wᵀ + b in bf16 for bf16 rows (rows, k) on the CPU: there and back."""


class _Calibrated:
    """Weights and static scales, which every set of kernels needs."""

    def __init__(
        self, amaxes: Amaxes, weights: WeightCodes, where: torch.device
    ) -> None:
        self._amaxes, self._weights, self._where = amaxes, weights, where

    def _codes(self, part: LinearPart, choice: Choice) -> Operand:
        assert choice.weight is not None
        return self._weights.get(part, choice.weight)

    def _input_scale(self, site: Site, choice: Choice) -> Tensor | None:
        if choice.input.granularity is not Granularity.TENSOR:
            return None
        largest = self._amaxes[site, Role.INPUT].amax()
        return scale_from_amax(largest, FORMATS[choice.input.format])


class ScaledMm(_Calibrated):
    """`torch._scaled_mm`: FP8 by tensor and by row."""

    name = "torch._scaled_mm"

    def takes(self, component: Component, choice: Choice) -> bool:
        """FP8 × FP8, by tensor and by row."""
        return scaled_mm.runs(choice)

    def linear(self, part: LinearPart, x: Tensor, choice: Choice) -> Tensor:
        """Narrow the input on the device, and multiply."""
        assert choice.weight is not None
        scale = self._input_scale(part.site, choice)
        rows = scaled_mm.narrowed(
            x.to(self._where),
            choice.input,
            None if scale is None else scale.to(self._where),
        )
        codes = self._codes(part, choice)
        weight = scaled_mm.packed(codes, FORMATS[choice.weight.format])
        bias = None if part.bias is None else part.bias.to(self._where)
        return scaled_mm.padded_mm(rows, weight.to(self._where), bias).cpu()


class TransformerEngine(_Calibrated):
    """Modules of Transformer Engine under `te.autocast`, a recipe for each choice."""

    name = "Transformer Engine"

    def __init__(
        self, amaxes: Amaxes, weights: WeightCodes, where: torch.device, engine: Any
    ) -> None:
        """`engine` is `transformer_engine.pytorch`."""
        super().__init__(amaxes, weights, where)
        self._engine, self._recipes = engine, te.recipes()

    def takes(self, component: Component, choice: Choice) -> bool:
        """Whatever has a recipe."""
        return choice.is_narrow and te.refusal(component, choice) is None

    def linear(self, part: LinearPart, x: Tensor, choice: Choice) -> Tensor:
        """Make a module of the matrix, and run it once."""
        input_scale = self._input_scale(part.site, choice)
        scales = None
        if input_scale is not None:
            weight_scale = self._codes(part, choice)[1]
            assert weight_scale is not None
            scales = (input_scale, weight_scale.view(()))
        made = te.TeLinear(
            self._engine,
            part.weight,
            part.bias,
            te.recipe_of(part.site.component, choice, self._recipes),
            scales,
            str(self._where),
        )
        return made(x.to(self._where)).cpu()


@dataclass(frozen=True, slots=True)
class Compared:
    """One matrix, run by the device and by the emulation on the same input."""

    site: Site
    part: str
    choice: str
    relative: float  # ‖device - emulation‖ / ‖emulation‖
    differing: float  # share of the outputs that are not the same bf16 number


class _Comparing(Stacked):
    def __init__(
        self, stack: Stack, amaxes: Amaxes, weights: WeightCodes, kernels: Kernels
    ) -> None:
        super().__init__(stack, amaxes, weights)
        self._kernels = kernels
        self.found: list[Compared] = []

    def linear(self, part: LinearPart, x: Tensor) -> Tensor:
        choice = self._choices.get(part.site)
        if choice is None or not self._kernels.takes(part.site.component, choice):
            return super().linear(part, x)
        x = round_to_format(x, BF16)
        y = super().linear(part, x)
        rows = x.flatten(0, -2).to(torch.bfloat16)
        other = self._kernels.linear(part, rows, choice).float().view(y.shape)
        self.found.append(
            Compared(
                part.site,
                part.name,
                choice.name,
                _ratio(float((other - y).norm()), float(y.norm())),
                float((other != y).float().mean()),
            )
        )
        return y


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.inf if part else 0.0


@torch.no_grad()
def compare(
    model: LoadedModel,
    ids: Tensor,
    stack: Stack,
    amaxes: Amaxes,
    weights: WeightCodes,
    kernels: Kernels,
) -> list[Compared]:
    """Run ids (batch, tokens) through the stack; return every matrix that ran twice."""
    run = _Comparing(stack, amaxes, weights, kernels)
    model.forward(ids, run)
    return run.found


# Where, and how long


def executed_on() -> dict[str, Any]:
    """Return what FP8 runs on in this process: its own GPU, or the emulation."""
    if not torch.cuda.is_available():
        return {"device": "cpu", "emulated": True}
    major, minor = torch.cuda.get_device_capability(0)
    return {
        "device": torch.cuda.get_device_name(0),
        "emulated": (major, minor) < (8, 9),  # the first with FP8 units
        "compute_capability": f"{major}.{minor}",
    }


Op = Callable[[], object]
REPEATS = 11


@torch.no_grad()
def graph_seconds(calls: Sequence[Op], cuda: Any = torch.cuda) -> float:
    """Return the median seconds of one of the calls, all of them in one CUDA graph.

    So the host launches nothing in between. `cuda` is `torch.cuda`.
    """
    if not cuda.is_available():
        raise HardwareError("CUDA graphs need a CUDA device")
    beside = cuda.Stream()
    beside.wait_stream(cuda.current_stream())
    with cuda.stream(beside):  # what is made at a first call must not be captured
        for call in calls:
            call()
    cuda.current_stream().wait_stream(beside)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    took = [_replay_s(graph, cuda) for _ in range(REPEATS)]
    return statistics.median(took) / len(calls)


def _replay_s(graph: Any, cuda: Any) -> float:
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3  # it says milliseconds
