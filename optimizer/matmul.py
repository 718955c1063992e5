"""Products of matrices: fp32's on the fastest kernel at hand, and exact ones of codes.

The vendor BLAS that torch calls for float32 runs at half speed on processors of
another vendor, so the kernels of oneDNN are called by name where torch has them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from optimizer.errors import SpecError
from optimizer.formats import Format
from optimizer.quantize import quantize, round_to_format


def _onednn_kernel() -> Any:
    """Return torch's operator for x Wᵀ + b on oneDNN, or None."""
    if not torch.backends.mkldnn.is_available():
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def _has_bf16_units() -> bool:
    """Whether oneDNN multiplies float32 tensors on bf16 units: its tiles (AMX) only.

    With AVX512-BF16 alone it accepts the setting and runs its float32 kernel.
    """
    probe = getattr(torch.cpu, "_is_amx_tile_supported", None)  # torch >= 2.6
    return bool(probe and probe())


MATMUL_PRECISION = "bf16" if _has_bf16_units() else "ieee"
"""What float32 products of codes run on: bf16 units where that is faster."""


@contextmanager
def _float32_products(precision: str) -> Iterator[None]:
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if matmul is None:  # an older torch multiplies float32 in float32
        yield
        return
    before = matmul.fp32_precision
    matmul.fp32_precision = precision
    try:
        yield
    finally:
        matmul.fp32_precision = before


_KERNEL = _onednn_kernel()
_NO_POST_OP: tuple[str, list[float], str] = ("none", [], "")


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + b without a graph."""
    if _KERNEL is None or x.numel() == 0 or weight.numel() == 0:
        return functional.linear(x, weight, bias)
    product: Tensor = _KERNEL(x, weight, bias, *_NO_POST_OP)
    return product


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class _Linear(torch.autograd.Function):
    """x Wᵀ + b whose gradient goes to x alone: weights are never trained here."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: Product,
        back: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.back = back
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        back = ctx.back(gradients[0].contiguous(), weight)
        return back, None, None, None, None


def way_back(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return g W in float32: (..., out), (out, in) -> (..., in)."""
    return _product(gradient, weight.T, None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b in float32: (..., in), (out, in), (out,) -> (..., out).

    Differentiable in x only.
    """
    return _linear(x, weight, bias, _product, way_back)


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    product: Product,
    back: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        y: Tensor = _Linear.apply(x, weight, bias, product, back)
        return y
    return product(x, weight, bias)


# Products of estimates


def _has_bf16_products() -> bool:
    """Whether the processor has instructions for bf16 products: twice as fast."""
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # torch >= 2.7
    return bool(probe and probe())


ROUGH = torch.bfloat16 if _has_bf16_products() else torch.float32
"""What estimates are multiplied in: a share of 2⁻⁹ is nothing beside their noise."""


def rough(x: Tensor) -> Tensor:
    """Return `x` in the precision of estimates, itself where that is float32."""
    return x.to(ROUGH)


def rough_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    told: Callable[[Tensor], None] = lambda gradient: None,
) -> Tensor:
    """Return `linear` with operands of 8 significant bits where that is faster.

    Sums and results are float32. Differentiable in x only, by `rough_way_back`;
    `told` hears of the gradient of what is returned, in the precision of estimates.
    """

    def back(gradient: Tensor, weight: Tensor) -> Tensor:
        told(rough(gradient))
        return rough_way_back(gradient, weight)

    return _linear(x, weight, bias, _rough_product, back)


def _rough_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if MATMUL_PRECISION == "ieee" or x.numel() == 0:
        return _product(x, weight, bias)
    with _float32_products(MATMUL_PRECISION):
        return functional.linear(x, weight, bias)


def rough_way_back(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return `way_back` in the precision of estimates, float32."""
    if MATMUL_PRECISION == "bf16":  # the bits do not depend on the number of threads
        return _rough_product(gradient, weight.T, None)
    if ROUGH is torch.float32:
        return way_back(gradient, weight)
    return (rough(gradient) @ rough(weight)).float()


# Products of codes


def matmul_codes(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b.T` summed in float32: (..., k), (n, k) -> (..., n).

    Both hold numbers of at most 8 significant bits (FP8, bf16), so every product is
    exact in bf16 units as well as in float32 ones, and only the sums round.
    """
    if MATMUL_PRECISION == "ieee":
        return _product(a, b, None)
    with _float32_products(MATMUL_PRECISION):
        return functional.linear(a, b)


def scaled_product(
    x: Tensor, x_scale: Tensor | None, weight: Tensor, weight_scale: Tensor | None
) -> Tensor:
    """Return x Wᵀ of codes, summed in float32 and scaled after: (..., n).

    `x_scale` is () or (..., 1), `weight_scale` has 1 or n elements; None: no scale.
    """
    return scaled(matmul_codes(x, weight.detach()), x_scale, weight_scale)


def scaled(
    total: Tensor, x_scale: Tensor | None, weight_scale: Tensor | None
) -> Tensor:
    """Multiply sums of products of codes (..., n), in place, by the scales behind them."""
    if x_scale is not None:
        total.mul_(x_scale)
    if weight_scale is not None:
        total.mul_(weight_scale.reshape(-1))
    return total


def grouped_product(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    group: int,
) -> Tensor:
    """Return x Wᵀ of codes whose scales change every `group` columns: (..., n).

    Scales are (..., k) and (n, k), filled group by group; None: no scale. The sum
    over a group, in float32, is scaled by the product of both scales, and the groups
    are added in float32: what kernels for block scales do (DeepGEMM, CUTLASS).
    """
    rows = x.flatten(0, -2)
    by_row = None if x_scale is None else x_scale.flatten(0, -2)
    total = torch.zeros(len(rows), len(weight))
    for start in range(0, rows.shape[-1], group):
        part = slice(start, start + group)
        sums = matmul_codes(
            rows[:, part].contiguous(), weight.detach()[:, part].contiguous()
        )
        scale = torch.ones(())
        if by_row is not None:
            scale = scale * by_row[:, start, None]
        if weight_scale is not None:
            scale = scale * weight_scale[None, :, start]
        total.addcmul_(sums, scale)
    return total.view(*x.shape[:-1], len(weight))


EXACT_COLUMNS = 1024  # 127 · 127 · 1024 < 2^24: float32 adds them up without rounding


def integer_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ of int8 codes, summed exactly and rounded to float32 once: (..., n).

    An int32 accumulator holds every sum of up to 133,000 columns.
    """
    parts = zip(
        x.split(EXACT_COLUMNS, dim=-1),
        weight.detach().split(EXACT_COLUMNS, dim=-1),
        strict=True,
    )
    sums = [matmul_codes(a.contiguous(), b.contiguous()).double() for a, b in parts]
    return torch.stack(sums).sum(dim=0).float()


def linear_fp8(
    x: Tensor,
    weight_codes: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor,
    in_fmt: Format,
    out_fmt: Format,
    bias: Tensor | None = None,
) -> Tensor:
    """Return what an FP8 kernel hands on: (..., k), (n, k) -> (..., n), float32.

    x is quantized to `in_fmt` (bf16 with scale 1 makes it weight-only), products of
    codes are summed in float32, then scaled (`weight_scale` has 1 or n elements,
    `input_scale` is () or (..., 1)), then biased, then rounded once to `out_fmt`.
    Raises SpecError for block scales, which belong inside the sum.
    """
    if weight_scale.numel() not in (1, len(weight_codes)):
        raise SpecError(
            f"{weight_scale.numel()} weight scales for {len(weight_codes)} outputs"
        )
    codes = quantize(x, input_scale, in_fmt)
    total = scaled_product(codes, input_scale, weight_codes, weight_scale)
    if bias is not None:
        total.add_(bias)
    return round_to_format(total, out_fmt)
