"""Products of matrices in FP8, forward and backward: on a GPU's own units, or emulated.

Hybrid, as Transformer Engine calls it: e4m3 for x and W, e5m2 for gradients.

    y  = x Wᵀ    fprop    e4m3 × e4m3
    dx = g W     dgrad    e5m2 × e4m3
    dW = gᵀ x    wgrad    e5m2 × e4m3

Emulated, codes are multiplied exactly and summed in float32, scaled, and rounded once
to bf16: what a tensor core hands on, but for the order of its sums. One scale for each
tensor: of its own largest value (current), or of the largest of earlier steps
(delayed), where values beyond it clamp.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from optimizer import scaled_mm
from optimizer.formats import Format
from optimizer.matmul import matmul_codes
from optimizer.quantize import scale_from_amax
from optimizer.scaled_mm import DTYPES, Packed
from optimizer.training.candidates import (
    HISTORY,
    Arithmetic,
    Candidate,
    Gemm,
    Scaling,
    format_of,
)
from optimizer.training.exponents import rounded


@dataclass(slots=True, eq=False)
class Scales:
    """The scales of one matrix: x, W and the gradient of y, each one number.

    Delayed, they follow Transformer Engine: 1 before the first step, then the largest
    value of the last `HISTORY` steps, over the format's largest number.
    """

    scaling: Scaling
    history: dict[str, list[float]] = field(default_factory=dict)  # amax by step
    now: dict[str, float] = field(default_factory=dict)  # amax of the current step

    def of(self, role: str, x: Tensor, fmt: Format) -> Tensor:
        """Return the scale of an operand, and remember how large it is."""
        finite = x.detach().float().nan_to_num(0.0, 0.0, 0.0)
        amax = finite.abs().max() if finite.numel() else finite.new_zeros(())
        if self.scaling is Scaling.CURRENT:
            return scale_from_amax(amax, fmt)
        self.now[role] = max(self.now.get(role, 0.0), float(amax))
        return self.standing(role, fmt).to(x.device)

    def standing(self, role: str, fmt: Format) -> Tensor:
        """Return the delayed scale of a role as it is in this step."""
        earlier = self.history.get(role)
        if not earlier:
            return torch.ones(())
        return scale_from_amax(torch.tensor(max(earlier)), fmt)

    def roll(self) -> None:
        """End a step: what it had is what the next one goes by."""
        for role, amax in self.now.items():
            self.history[role] = [*self.history.get(role, []), amax][-HISTORY:]
        self.now = {}


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a bᵀ of codes, summed in float32: (m, k), (n, k) -> (m, n)."""
    if a.device.type == "cpu":
        return matmul_codes(a.contiguous(), b.contiguous())
    return functional.linear(a, b)


class Read(NamedTuple):
    """An operand: what a product reads, (rows, k), and what that is to its matrix."""

    role: str  # input, weight, gradient
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Matrix:
    """Runs the three products of one matrix, some of them promoted to bf16."""

    name: str
    candidate: Candidate
    scales: Scales

    def multiply(self, gemm: Gemm, a: Read, b: Read) -> Tensor:
        """Return a bᵀ in bf16: (m, k), (n, k) -> (m, n)."""
        arithmetic = self.candidate.runs(self.name, gemm)
        if arithmetic is Arithmetic.FP8 and scaled_mm.has_units(a.values.device):
            return scaled_mm.padded_mm(
                self._codes(arithmetic, a), self._codes(arithmetic, b)
            )
        left, right = self._narrow(arithmetic, a), self._narrow(arithmetic, b)
        return product(left, right).to(torch.bfloat16)

    def _narrow(self, arithmetic: Arithmetic, read: Read) -> Tensor:
        """Return an operand as its product reads it, in float32."""
        x, fmt = read.values, format_of(arithmetic, read.role)
        scale = torch.ones((), device=x.device)
        if arithmetic is Arithmetic.FP8:
            scale = self.scales.of(read.role, x, fmt)
        if fmt.scaled:
            return _held(x, scale, fmt)
        return x.to(
            torch.bfloat16 if arithmetic is Arithmetic.BF16 else x.dtype
        ).float()

    def _codes(self, arithmetic: Arithmetic, read: Read) -> Packed:
        """Return an operand as FP8 units read it; inf, which e4m3 has not, is NaN."""
        x, fmt = read.values.detach().float(), format_of(arithmetic, read.role)
        scale = self.scales.of(read.role, x, fmt)
        near = (x / scale).clamp(-fmt.max, fmt.max)
        codes = torch.where(x.isfinite(), near, torch.nan).to(DTYPES[fmt.name])
        return Packed(codes.contiguous(), scale.float())

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x Wᵀ + b in bf16: (..., in), (out, in) -> (..., out)."""
        y: Tensor = _Product.apply(x, weight, self)
        return y if bias is None else y + bias.to(y.dtype)


def _held(x: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """Round to FP8 and back; inf and NaN, which a run may well make, stay what they are."""
    x = x.detach().float()
    near = rounded(x.nan_to_num(0.0, 0.0, 0.0), scale, fmt)
    return torch.where(x.isfinite(), near, x)


class _Product(torch.autograd.Function):
    """y = x Wᵀ with each product's operands rounded; what comes out is bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, matrix: Fp8Matrix) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.matrix = matrix
        rows = Read("input", x.reshape(-1, x.shape[-1]))
        y = matrix.multiply(Gemm.FPROP, rows, Read("weight", weight))
        return y.reshape(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        matrix: Fp8Matrix = ctx.matrix
        g = gradients[0].reshape(-1, len(weight))
        dx = dw = None
        if ctx.needs_input_grad[0]:
            left, right = Read("gradient", g), Read("weight", weight.T)
            dx = matrix.multiply(Gemm.DGRAD, left, right)
            dx = dx.reshape(x.shape).to(x.dtype)
        if ctx.needs_input_grad[1]:
            rows = x.reshape(-1, x.shape[-1])
            left, right = Read("gradient", g.T), Read("input", rows.T)
            dw = matrix.multiply(Gemm.WGRAD, left, right).to(weight.dtype)
        return dx, dw, None
