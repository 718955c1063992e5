"""Products of matrices in FP8, forward and backward, emulated on any device.

Hybrid, as Transformer Engine calls it: e4m3 for x and W, e5m2 for gradients.

    y  = x Wᵀ    fprop    e4m3 × e4m3
    dx = g W     dgrad    e5m2 × e4m3
    dW = gᵀ x    wgrad    e5m2 × e4m3

Codes are multiplied exactly and summed in float32, scaled, and rounded once to bf16:
what a tensor core hands on. One scale for each tensor: of its own largest value
(current), or of the largest of earlier steps (delayed), where values beyond it clamp.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from optimizer.formats import Format
from optimizer.matmul import matmul_codes
from optimizer.quantize import scale_from_amax
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


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Matrix:
    """Runs the three products of one matrix, some of them promoted to bf16."""

    name: str
    candidate: Candidate
    scales: Scales

    def narrow(self, gemm: Gemm, role: str, x: Tensor) -> Tensor:
        """Return an operand as its product reads it, in float32."""
        arithmetic = self.candidate.runs(self.name, gemm)
        fmt = format_of(arithmetic, role)
        scale = torch.ones((), device=x.device)
        if arithmetic is Arithmetic.FP8:
            scale = self.scales.of(role, x, fmt)
        if fmt.scaled:
            return _held(x, scale, fmt)
        return x.to(
            torch.bfloat16 if arithmetic is Arithmetic.BF16 else x.dtype
        ).float()

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
        rows = matrix.narrow(Gemm.FPROP, "input", x.reshape(-1, x.shape[-1]))
        y = product(rows, matrix.narrow(Gemm.FPROP, "weight", weight))
        return y.to(torch.bfloat16).view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        matrix: Fp8Matrix = ctx.matrix
        g = gradients[0].reshape(-1, len(weight))
        dx = dw = None
        if ctx.needs_input_grad[0]:
            left = matrix.narrow(Gemm.DGRAD, "gradient", g)
            right = matrix.narrow(Gemm.DGRAD, "weight", weight)
            dx = product(left, right.T).to(torch.bfloat16)
            dx = dx.view(x.shape).to(x.dtype)
        if ctx.needs_input_grad[1]:
            rows = x.reshape(-1, x.shape[-1])
            left = matrix.narrow(Gemm.WGRAD, "gradient", g)
            right = matrix.narrow(Gemm.WGRAD, "input", rows)
            dw = product(left.T, right.T).to(torch.bfloat16).to(weight.dtype)
        return dx, dw, None
