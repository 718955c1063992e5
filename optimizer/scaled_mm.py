"""FP8 products on a device's own units, by `torch._scaled_mm`.

The operator runs on CPUs as well, for checks, and takes shapes and pairs of operands
there that no GPU does. So the rules are checked here: K and N in steps of 16, e5m2 for
one operand at most, and scales in fp32, one for each whole operand or one for every row
of both. Sizes off the steps are padded with zeros, which changes no product.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from optimizer.errors import HardwareError
from optimizer.execute import Operand
from optimizer.formats import FORMATS, Format
from optimizer.padding import fitting
from optimizer.quantize import to_codes
from optimizer.rules import FP8_MULTIPLE
from optimizer.stack import Choice, Granularity, Precision

DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
FP8_UNITS = (8, 9)  # the first compute capability that has them
_GRANULARITIES = (
    (Granularity.TENSOR, Granularity.TENSOR),
    (Granularity.TOKEN, Granularity.CHANNEL),
)


def has_units(where: torch.device) -> bool:
    """Whether a device multiplies FP8 itself."""
    if where.type != "cuda":
        return False
    return torch.cuda.get_device_capability(where) >= FP8_UNITS


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """One operand: FP8 codes (rows, k) and their fp32 scale, () or (rows, 1)."""

    codes: Tensor
    scale: Tensor

    def to(self, where: torch.device) -> "Packed":
        """Return the operand on another device."""
        return Packed(self.codes.to(where), self.scale.to(where))


def runs(choice: Choice) -> bool:
    """Whether the operator runs a linear choice: FP8 × FP8, by tensor or by row."""
    if choice.weight is None or choice.weight_only:
        return False
    formats = {choice.input.format, choice.weight.format}
    pair = (choice.input.granularity, choice.weight.granularity)
    return formats <= DTYPES.keys() and pair in _GRANULARITIES


def packed(operand: Operand, fmt: Format) -> Packed:
    """Return codes as they lie in memory. Their numbers are in fp32, on the CPU."""
    numbers, scale = operand
    assert scale is not None
    codes = to_codes(numbers, fmt).view(DTYPES[fmt.name])
    return Packed(codes, scale.float() if scale.ndim == 2 else scale.float().view(()))


def narrowed(x: Tensor, precision: Precision, scale: Tensor | None) -> Packed:
    """Return x (rows, k) in FP8, on its own device; without `scale` one for each row.

    Clamped before the cast, which in torch saturates or not by version; between the
    clamps every build rounds to nearest, ties to even.
    """
    fmt = FORMATS[precision.format]
    x = x.float()
    if scale is None:
        largest = x.abs().amax(-1, keepdim=True)
        tiny = torch.finfo(torch.float32).tiny
        scale = (largest / fmt.max).clamp(min=tiny).masked_fill(largest == 0, 1.0)
    return Packed((x / scale).clamp(-fmt.max, fmt.max).to(DTYPES[fmt.name]), scale)


def refusal(x: Packed, weight: Packed) -> str | None:
    """Say why a GPU would not multiply these; None: it does."""
    if {x.codes.dtype, weight.codes.dtype} == {torch.float8_e5m2}:
        return "e5m2 × e5m2: one operand at most may be e5m2"
    if x.codes.shape[1] != weight.codes.shape[1]:
        return f"K = {x.codes.shape[1]} and {weight.codes.shape[1]} differ"
    sizes = {"K": x.codes.shape[1], "N": weight.codes.shape[0]}
    for name, size in sizes.items():
        if size % FP8_MULTIPLE:
            return f"{name} = {size} is not a multiple of {FP8_MULTIPLE}"
    for operand in (x, weight):
        if operand.scale.dtype != torch.float32:
            return f"a scale is {operand.scale.dtype}, not float32"
        rows = len(operand.codes)
        if operand.scale.ndim and operand.scale.shape != (rows, 1):
            return f"scales {tuple(operand.scale.shape)} are neither () nor ({rows}, 1)"
    if not (x.codes.is_contiguous() and weight.codes.is_contiguous()):
        return "the first operand must lie row by row, the second column by column"
    return None


def scaled_mm(x: Packed, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b in bf16: (m, k), (n, k), (n,) -> (m, n).

    Raises HardwareError for what a GPU would not multiply, also on a CPU.
    """
    no = refusal(x, weight)
    if no is not None:
        raise HardwareError(no)
    by_row = bool(x.scale.ndim or weight.scale.ndim)
    return torch._scaled_mm(
        x.codes,
        weight.codes.t(),
        scale_a=_rows(x) if by_row else x.scale,
        scale_b=_rows(weight).t() if by_row else weight.scale,
        bias=None if bias is None else bias.to(torch.bfloat16),
        out_dtype=torch.bfloat16,
    )


def _rows(operand: Packed) -> Tensor:
    return operand.scale.expand(len(operand.codes), 1).contiguous()


def padded_mm(x: Packed, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """Return `scaled_mm` of operands of any size: zeros in, and what they make out."""
    n, k = weight.codes.shape
    wide = fitting(n)
    by_n = bias if bias is None else pad(bias, (0, wide - n))
    grown = (grow(x, len(x.codes), fitting(k)), grow(weight, wide, fitting(k)))
    return scaled_mm(*grown, by_n)[:, :n]


def grow(operand: Packed, rows: int, columns: int) -> Packed:
    """Return the operand with zeros below and to the right; new rows have scale 1."""
    have = operand.codes.shape
    if have == (rows, columns):
        return operand
    more = (0, columns - have[1], 0, rows - have[0])
    codes = pad(operand.codes.view(torch.uint8), more).view(operand.codes.dtype)
    if operand.scale.ndim == 0:
        return Packed(codes, operand.scale)
    return Packed(codes, pad(operand.scale, (0, 0, 0, rows - have[0]), value=1.0))
