"""A stack on a real device, or held against its emulation, and how long it takes there.

Where a GPU has FP8 units, whole stacks are run with them (`executor`). To compare
(`compare`), the emulation drives: it runs the stack as everywhere else, and at every
matrix that the device's kernels take the same bf16 input goes to the device as well.
What comes back is compared site by site. Attention and activation functions stay
emulated.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from optimizer import scaled_mm, te
from optimizer.device_state import cpu_name
from optimizer.errors import HardwareError
from optimizer.execute import Amaxes, Operand, Stacked, WeightCodes
from optimizer.formats import BF16, FORMATS
from optimizer.matmul import MATMUL_PRECISION
from optimizer.model import LoadedModel
from optimizer.overflow import Noting
from optimizer.quantize import round_to_format, scale_from_amax
from optimizer.sites import LinearPart
from optimizer.stack import Choice, Component, Granularity, Role, Site, Stack


class Kernels(Protocol):
    """What multiplies on a device."""

    name: str

    def takes(self, component: Component, choice: Choice) -> bool:
        """Whether a linear choice runs there."""

    def linear(self, part: LinearPart, x: Tensor, choice: Choice) -> Tensor:
        """Return x Wᵀ + b in bf16 for rows (rows, k) on the CPU: there and back."""


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


# Running


class OnDevice(Noting):
    """A stack whose FP8 products run on a device's own units; the rest is emulated."""

    def __init__(
        self, stack: Stack, amaxes: Amaxes, weights: WeightCodes, kernels: Kernels
    ) -> None:
        super().__init__(stack, amaxes, weights)
        self._kernels = kernels

    def linear(self, part: LinearPart, x: Tensor) -> Tensor:
        """Have the device narrow the input and multiply, where it takes the choice."""
        choice = self._choices.get(part.site)
        if choice is None or not self._kernels.takes(part.site.component, choice):
            return super().linear(part, x)
        self._input(part.site, x)  # notes the tokens that go beyond FP8
        y = self._kernels.linear(part, x.flatten(0, -2), choice).float()
        return round_to_format(y.view(*x.shape[:-1], -1), FORMATS[choice.output])


def executor(stack: Stack, amaxes: Amaxes, weights: WeightCodes) -> Noting:
    """Return what runs a stack here: this process's FP8 units, or the emulation."""
    if executed_on()["emulated"]:
        return Noting(stack, amaxes, weights)
    kernels = ScaledMm(amaxes, weights, torch.device("cuda"))
    return OnDevice(stack, amaxes, weights, kernels)


# Where, and how long


def executed_on() -> dict[str, Any]:
    """Return what FP8 runs on in this process: its own GPU, or the emulation."""
    beside = {
        "processor": cpu_name(),
        "matmul": "fp32" if MATMUL_PRECISION == "ieee" else "bf16",
        "torch": torch.__version__,
    }
    if not torch.cuda.is_available():
        return {"device": "cpu", "emulated": True, "kernels": None, **beside}
    capability = torch.cuda.get_device_capability(0)
    units = scaled_mm.has_units(torch.device("cuda", 0))
    return {
        "device": torch.cuda.get_device_name(0),
        "emulated": not units,
        "kernels": ScaledMm.name if units else None,
        "compute_capability": "{}.{}".format(*capability),
        **beside,
    }


def as_one(places: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what several stacks were run on, which as a rule is one place.

    Workers may differ: then it is the first place that emulates, and `also` names the
    others.
    """
    distinct = [p for i, p in enumerate(places) if p not in places[:i]]
    first = next((p for p in distinct if p["emulated"]), distinct[0])
    also = [f"{p['device']}, {p['processor']}" for p in distinct if p is not first]
    return {**first, "also": also}


def executed_as(place: Mapping[str, Any]) -> str:
    """Say what the figures of quality rest on."""
    if place["emulated"]:
        return (
            "Formats are emulated on a CPU: products of codes accumulated in fp32, scaled, "
            "rounded once. A GPU's own accumulation order may differ in the last bit."
        )
    return (
        f"FP8 matrices of the validated stacks were multiplied by {place['device']} "
        f"({place['kernels']}); attention, activations and every other format, and the "
        "sweep that predicts, are emulated on a CPU."
    )


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
