"""The matrices of a network, run as a candidate says, and what went through each.

Every `Linear` (and GPT-2's transposed one) is a matrix. Its forward is replaced on the
instance; autocast and autograd do the rest, so that what a run records is what torch
computed. A matrix that transformers keeps as a bare parameter, as it does a layer's
experts, is left as it is and listed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from optimizer.formats import BF16, E4M3, E5M2, FP16, Format
from optimizer.quantize import amax, scale_from_amax
from optimizer.stack import Granularity
from optimizer.training.candidates import (
    OPERANDS,
    Arithmetic,
    Candidate,
    Gemm,
    Scaling,
    format_of,
)
from optimizer.training.exponents import Seen, SeenBy, look
from optimizer.training.fp8 import Fp8Matrix, Scales

NARROWEST_FIRST = (Arithmetic.FP8, Arithmetic.FP16, Arithmetic.BF16, Arithmetic.FP32)
CONV1D = "Conv1D"  # transformers': its weight is (in, out); named, so as not to load it


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """One matrix of a network."""

    name: str
    module: nn.Module
    transposed: bool  # stored as (in, out)

    @property
    def parameter(self) -> nn.Parameter:
        """Its weight, as it is stored."""
        return cast(nn.Parameter, self.module.weight)

    @property
    def weight(self) -> Tensor:
        """Its weight as (out, in)."""
        return self.parameter.T if self.transposed else self.parameter

    @property
    def bias(self) -> Tensor | None:
        """The (out,) bias, or None."""
        return cast("Tensor | None", getattr(self.module, "bias", None))


def matrices(network: nn.Module) -> Iterator[Matrix]:
    """Yield every matrix, in the order of the module tree."""
    for name, module in network.named_modules():
        transposed = type(module).__name__ == CONV1D
        if isinstance(module, nn.Linear) or transposed:
            yield Matrix(name, module, transposed)


def bare(network: nn.Module) -> list[str]:
    """Return the parameters of three dimensions: matrices that are in no `Linear`."""
    return [name for name, p in network.named_parameters() if p.ndim == 3]


# -- what goes through ------------------------------------------------------------


@dataclass(eq=False)
class Recorder:
    """Keeps what went through each matrix, in the steps in which it is `on`.

    What a try of a step shows counts once the step is taken: `keep`.
    """

    candidate: Candidate
    on: bool = False
    seen: SeenBy = field(default_factory=dict)
    tried: SeenBy = field(default_factory=dict)  # in the step under way

    def begin(self, on: bool) -> None:
        """Begin a try of a step; what the last one showed is forgotten."""
        self.on, self.tried = on, {}

    def keep(self) -> None:
        """Add what the step under way showed."""
        for matrix, roles in self.tried.items():
            for role, found in roles.items():
                self._add(self.seen, matrix, role, found)
        self.begin(on=False)

    def saw(self, matrix: str, role: str, x: Tensor, scales: Scales | None) -> None:
        """Add a tensor of a matrix."""
        if not self.on:
            return
        found = look(x, self._formats(matrix, role, x, scales))
        self._add(self.tried, matrix, role, found)

    @staticmethod
    def _add(seen: SeenBy, matrix: str, role: str, found: Seen) -> None:
        roles = seen.setdefault(matrix, {})
        if role in roles:
            roles[role].merge(found)
        else:
            roles[role] = found

    def _formats(
        self, matrix: str, role: str, x: Tensor, scales: Scales | None
    ) -> dict[str, tuple[Format, Tensor]]:
        """Return the formats that count: the run's own, or in fp32 all that may come."""
        one = torch.ones((), device=x.device)
        if self.candidate.arithmetic is Arithmetic.FP32:
            narrow = E5M2 if role == "gradient" else E4M3
            own = scale_from_amax(_finite_amax(x), narrow)
            unscaled = {f.name: (f, one) for f in (BF16, FP16)}
            return unscaled | {narrow.name: (narrow, own)}
        fmt = format_of(self._arithmetic(matrix, role), role)
        if not fmt.scaled:
            return {fmt.name: (fmt, one)}
        if scales is not None and scales.scaling is Scaling.DELAYED:
            return {fmt.name: (fmt, scales.standing(role, fmt).to(x.device))}
        return {fmt.name: (fmt, scale_from_amax(_finite_amax(x), fmt))}

    def _arithmetic(self, matrix: str, role: str) -> Arithmetic:
        """Return the narrowest arithmetic that reads, or hands on, a role."""
        gemms = [g for g in Gemm if role in OPERANDS[g]] or list(Gemm)
        found = [self.candidate.runs(matrix, gemm) for gemm in gemms]
        return min(found, key=NARROWEST_FIRST.index)


def _finite_amax(x: Tensor) -> Tensor:
    if not x.numel():
        return torch.zeros((), device=x.device)
    low, high = torch.aminmax(x.detach())
    largest = torch.maximum(-low, high).float()  # NaN where there is one
    if bool(largest.isfinite()):
        return amax(largest[None], Granularity.TENSOR)
    finite = x.detach().float().nan_to_num(0.0, 0.0, 0.0)
    return amax(finite, Granularity.TENSOR)


# -- running ----------------------------------------------------------------------


@dataclass(eq=False)
class Routed:
    """The matrices of one run, and the scales of those in FP8."""

    matrices: dict[str, Matrix]
    scales: dict[str, Scales]

    def record_weights(self, recorder: Recorder) -> None:
        """Record every W."""
        for name, matrix in self.matrices.items():
            recorder.saw(name, "weight", matrix.parameter, self.scales.get(name))

    def record_gradients(self, recorder: Recorder, scale: float) -> None:
        """Record the gradient of every W as the product handed it on: scaled."""
        for name, matrix in self.matrices.items():
            if matrix.parameter.grad is not None and recorder.on:
                gradient = matrix.parameter.grad * scale
                recorder.saw(name, "weight_gradient", gradient, None)

    def roll(self) -> None:
        """End a step: delayed scales follow what it had."""
        for scales in self.scales.values():
            scales.roll()


def route(network: nn.Module, candidate: Candidate, recorder: Recorder) -> Routed:
    """Run every matrix of `network` as the candidate says, and record it."""
    routed = Routed({m.name: m for m in matrices(network)}, {})
    for name, matrix in routed.matrices.items():
        scales = None
        if candidate.scaling is not None:
            scales = routed.scales[name] = Scales(candidate.scaling)
        forward = _forward(matrix, candidate, scales)
        matrix.module.forward = _recorded(matrix, forward, recorder, scales)
    return routed


Forward = Callable[[Tensor], Tensor]


def _forward(matrix: Matrix, candidate: Candidate, scales: Scales | None) -> Forward:
    """Return how a matrix computes y from x."""
    runs = {candidate.runs(matrix.name, gemm) for gemm in Gemm}
    if runs == {Arithmetic.FP32} and candidate.arithmetic is not Arithmetic.FP32:
        return _in_fp32(matrix)
    if scales is not None and Arithmetic.FP8 in runs:
        return _in_fp8(Fp8Matrix(matrix.name, candidate, scales), matrix)
    return cast(Forward, matrix.module.forward)


def _in_fp32(matrix: Matrix) -> Forward:
    """Compute outside of autocast. Without autocast the rest wants its own dtype back."""

    def forward(x: Tensor) -> Tensor:
        kind = x.device.type
        keeps = torch.is_autocast_enabled(kind)
        with torch.autocast(kind, enabled=False):
            bias = matrix.bias
            bias = None if bias is None else bias.float()
            y = functional.linear(x.float(), matrix.weight.float(), bias)
        return y if keeps else y.to(x.dtype)

    return forward


def _in_fp8(product: Fp8Matrix, matrix: Matrix) -> Forward:
    def forward(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return product(x, matrix.weight, matrix.bias)

    return forward


def _recorded(
    matrix: Matrix, inner: Forward, recorder: Recorder, scales: Scales | None
) -> Callable[..., Any]:
    """Record x and y on the way forward, and their gradients on the way back."""

    def saw(role: str, x: Tensor) -> None:
        recorder.saw(matrix.name, role, x, scales)

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not recorder.on or not torch.is_grad_enabled():
            return inner(x, *args, **kwargs)
        x = x.view_as(x)  # whose gradient is of this matrix alone
        saw("input", x)
        if x.requires_grad:
            x.register_hook(lambda g: saw("input_gradient", g))
        y = inner(x, *args, **kwargs)
        saw("output", y)
        if y.requires_grad:
            y.register_hook(lambda g: saw("gradient", g))
        return y

    return forward
