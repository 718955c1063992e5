"""Tensors in and out of the formats.

`scale` always means: x ≈ q * scale, with scale = amax / fmt.max. The narrow values q
are float32 tensors that hold numbers the format can represent; `to_codes` makes bytes
of them. torch's own FP8 casts are never used: their overflow changed between versions.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from optimizer.errors import NonFiniteError, SpecError
from optimizer.formats import E4M3, FP32, Format
from optimizer.reference import decode
from optimizer.stack import GROUP_SIZES, Granularity

BLOCK = GROUP_SIZES[Granularity.BLOCK]  # rows and columns that share a scale
PIECE = 1 << 15  # elements: fits the cache, and torch runs it in the calling thread,
# without a barrier for every operation (×10 in time where others keep a core busy)
PIECES_PER_THREAD = 8  # below, starting a thread costs more than it saves
TINY = torch.finfo(torch.float32).tiny
# Fields of a float32. Tensors: a Python number costs as much again as the operation.
EXPONENT_FIELD = torch.tensor(0x7F800000, dtype=torch.int32)
SIGN_BIT = torch.tensor(-(1 << 31), dtype=torch.int32)
IEEE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # casts that are stable


# Scales


def amax(x: Tensor, granularity: Granularity) -> Tensor:
    """Return the largest |x| of each group, float32, broadcastable against `x`.

    tensor: any shape -> (). channel and token: (..., features) -> (..., 1).
    head: (batch, heads, ...) -> (1, heads, 1, ...). block: (out, in) -> (out, in),
    each 128×128 block filled with its amax. group, mx, nv: (..., features) as it is,
    each group of neighbors filled with its amax. A NaN in a group makes its amax NaN.
    """
    match granularity:
        case Granularity.TENSOR:
            largest = _largest(x, tuple(range(x.dim()))).reshape(())
        case Granularity.CHANNEL | Granularity.TOKEN:
            largest = _largest(x, (-1,))
        case Granularity.HEAD:
            largest = _largest(x, tuple(d for d in range(x.dim()) if d != 1))
        case Granularity.BLOCK:
            largest = _block_amax(x)
        case Granularity.GROUP | Granularity.MX | Granularity.NV:
            largest = _group_amax(x, GROUP_SIZES[granularity])
    return largest.float()


def _largest(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    if x.numel() == 0 and len(dims) == x.dim():  # an expert that got no tokens
        return x.new_zeros((1,) * x.dim())
    # Two reductions read x twice and still beat x.abs(), which writes a copy.
    high, low = x.amax(dims, keepdim=True), x.amin(dims, keepdim=True)
    return torch.maximum(high.abs(), low.abs())


def _block_amax(x: Tensor) -> Tensor:
    rows, columns = x.shape
    padded = pad(x, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    filled = _largest(blocks, (1, 3)).expand_as(blocks)  # (rows, 128, columns, 128)
    return filled.reshape(padded.shape)[:rows, :columns]


def _group_amax(x: Tensor, size: int) -> Tensor:
    columns = x.shape[-1]
    groups = pad(x, (0, -columns % size)).unflatten(-1, (-1, size))
    return _largest(groups, (-1,)).expand_as(groups).flatten(-2)[..., :columns]


def finite_amax(x: Tensor, granularity: Granularity, where: str) -> Tensor:
    """Return `amax`; raise NonFiniteError naming `where` if x holds an inf or NaN."""
    largest = amax(x, granularity)
    if not largest.isfinite().all():
        raise NonFiniteError(where)
    return largest


def check_finite(x: Tensor, where: str) -> None:
    """Raise NonFiniteError naming `where` if x holds an inf or a NaN."""
    finite_amax(x, Granularity.TENSOR, where)


def scale_from_amax(amax: Tensor, fmt: Format) -> Tensor:
    """Return the float32 scale that maps `amax` onto `fmt.max`; 1 where amax is 0.

    A tiny amax gets the smallest normal float32, so no scale is ever zero. Formats
    wider than 8 bits have the range of the values themselves: their scale is 1.
    """
    ones = torch.ones_like(amax, dtype=torch.float32)
    if not fmt.scaled:
        return ones
    scale = (amax.float() / fmt.max).clamp(min=TINY)
    return torch.where(amax == 0, ones, scale)  # NaN stays NaN: never hide it


def mx_scale(amax: Tensor, fmt: Format) -> Tensor:
    """Return `reference.e8m0_floor_scale` of each amax; 1 where amax is 0.

    Rounding the exponent down is the rule of OCP MX 1.0: what lies in the top of its
    binade saturates. On normal numbers that loses less than rounding up for
    fp4_e2m1 (18.79 dB against 18.75) and little for fp6_e3m2 (25.37 against 25.55).
    """
    power = torch.bitwise_and(
        amax.float().contiguous().view(torch.int32), EXPONENT_FIELD
    )
    unit = 2.0 ** (math.frexp(fmt.max)[1] - 1)
    scale = (power.view(torch.float32) / unit).clamp(min=TINY)
    scale = torch.where(amax == 0, torch.ones_like(scale), scale)
    return torch.where(amax.isfinite(), scale, amax)  # NaN stays NaN


def nv_scale(amax: Tensor, whole: Tensor, fmt: Format) -> Tensor:
    """Return the scales of NVFP4: `reference.nv_block_scale` times the tensor's scale.

    `amax` is that of each block and `whole` () that of the tensor, whose scale maps
    it onto the largest block scale times the largest element.
    """
    tensor_scale = scale_from_amax(whole / E4M3.max, fmt)
    block = quantize(amax / fmt.max, tensor_scale, E4M3)
    block = block.clamp(min=E4M3.smallest_subnormal)
    return torch.where(amax == 0, torch.ones_like(block), block) * tensor_scale


def overflows(amax: Tensor | float, fmt: Format) -> bool:
    """Whether `fmt`, used without a scale, is too narrow for values up to `amax`."""
    return not fmt.scaled and bool((torch.as_tensor(amax) > fmt.max).any())


# Rounding


def round_to_format(x: Tensor, fmt: Format) -> Tensor:
    """Round each value as `reference.round_to` does; float32, the shape of x."""
    if fmt.name in IEEE_DTYPES:
        return _cast(x.detach(), fmt)
    return quantize(x, torch.ones(()), fmt)


def _cast(x: Tensor, fmt: Format) -> Tensor:
    """Round to a format of torch's own, whose casts are stable, and back."""
    narrow = x.clamp(-fmt.max, fmt.max).to(IEEE_DTYPES[fmt.name])
    return narrow.float().contiguous()


def holds(x: Tensor, fmt: Format) -> bool:
    """Whether a format without scales has every value of a contiguous `x` as it is."""
    pieces = x.detach().view(-1).split(PIECE)
    return all(torch.equal(round_to_format(piece, fmt), piece) for piece in pieces)


def quantize(x: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """Return `x / scale` rounded to `fmt`, saturated; float32, the shape of x.

    `scale` broadcasts against x. Raises SpecError for tf32, which is no storage format.
    """
    return _through(x, scale, fmt, lambda piece: None)


def dequantize(q: Tensor, scale: Tensor) -> Tensor:
    """Return `q * scale`, float32."""
    return q.float() * scale


def fake_quantize(x: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """Round x through `fmt` and back: `dequantize(quantize(x))` in one pass."""
    return _through(x, scale, fmt, lambda piece: piece.q.mul_(piece.scale))


class Piece(NamedTuple):
    """Views of a part of x, of its scales and of the result (as x, and flat)."""

    x: Tensor
    scale: Tensor
    q: Tensor
    flat: Tensor


def _through(
    x: Tensor, scale: Tensor, fmt: Format, finish: Callable[[Piece], object]
) -> Tensor:
    """Divide, round and finish piece by piece, so that the steps meet in the cache."""
    if x.numel() <= PIECE:
        return _at_once(x.detach(), scale.detach().float(), fmt, finish)
    out, pieces = _pieces(x.detach(), scale.detach().float())
    remaining = iter(pieces)  # shared: a thread on a busy core takes fewer of them

    @torch.inference_mode()
    def work(_: int) -> None:
        rounding = cache(partial(rounder, fmt))  # its scratch is this thread's own
        for piece in remaining:
            torch.div(piece.x, piece.scale, out=piece.q)
            rounding(piece.flat.numel())(piece.flat)
            finish(piece)

    threads = min(torch.get_num_threads(), len(pieces) // PIECES_PER_THREAD)
    if threads <= 1:
        work(0)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))  # list() raises what a thread raised
    return out


def _at_once(
    x: Tensor, scale: Tensor, fmt: Format, finish: Callable[[Piece], object]
) -> Tensor:
    """Do the same to what is one piece: a step of one token has a thousand of them."""
    out = torch.empty(x.shape)
    if scale.numel() == 1:
        scale = scale.reshape(())
    with torch.inference_mode():
        torch.div(x, scale, out=out)
        flat = out.view(-1)
        rounder(fmt, flat.numel())(flat)
        finish(Piece(x, scale, out, flat))
    return out


def _pieces(x: Tensor, scale: Tensor) -> tuple[Tensor, list[Piece]]:
    """Return an empty result and the pieces that cover it."""
    out = torch.empty(x.shape)
    if scale.numel() == 1:
        rows, width = x.reshape(-1), 1
        scales = scale.reshape(1).expand(rows.shape)
    else:
        rows, width = x.reshape(-1, x.shape[-1]), x.shape[-1]
        shape = (*x.shape[:-1], scale.shape[-1])
        scales = scale.expand(shape).reshape(-1, scale.shape[-1])
    length = max(1, PIECE // width)
    views = (t.split(length) for t in (rows, scales, out.view(rows.shape)))
    flat = out.view(-1).split(length * width)
    return out, [Piece(*p) for p in zip(*views, flat, strict=True)]


def rounder(fmt: Format, size: int) -> Callable[[Tensor], None]:
    """Return the function that rounds `size` float32 numbers in place.

    It keeps its scratch memory, which a loop over many rows saves making again.
    Raises SpecError for tf32.
    """
    if fmt == FP32:
        return partial(_saturate, fmt)
    if fmt.name in IEEE_DTYPES:
        return partial(
            _round_by_cast, fmt, torch.empty(size, dtype=IEEE_DTYPES[fmt.name])
        )
    if fmt.exponent_bits >= FP32.exponent_bits:
        raise SpecError(f"{fmt.name} is a way to multiply, not a format to store")
    return partial(_round_by_magic, fmt, _Scratch.of(size), _Scratch.of(size))


def _saturate(fmt: Format, q: Tensor) -> None:
    q.clamp_(-fmt.max, fmt.max)


def _round_by_cast(fmt: Format, narrow: Tensor, q: Tensor) -> None:
    _saturate(fmt, q)
    narrow.copy_(q)
    q.copy_(narrow)


class _Scratch(NamedTuple):
    values: Tensor
    bits: Tensor  # the same memory as int32

    @classmethod
    def of(cls, size: int) -> "_Scratch":
        values = torch.empty(size)
        return cls(values, values.view(torch.int32))


def _round_by_magic(fmt: Format, power: _Scratch, spare: _Scratch, q: Tensor) -> None:
    """Round q in place: adding and subtracting a big number drops the low bits.

    With 2^e ≤ |q| < 2^(e+1) and M = 1.5 * 2^(e + 23 - mantissa_bits), float32 keeps of
    q + M just the bits that the format has, rounded to even. Below the smallest
    normal e stays what it is there, which gives the subnormals.
    """
    magic = 1.5 * 2.0 ** (FP32.mantissa_bits - fmt.mantissa_bits)
    bits = q.view(torch.int32)
    _saturate(fmt, q)
    torch.bitwise_and(bits, EXPONENT_FIELD, out=power.bits)
    power.values.clamp_min_(fmt.smallest_normal)
    torch.add(q, power.values, alpha=magic, out=spare.values)
    spare.values.sub_(power.values, alpha=magic)
    if fmt.has_negative_zero:  # M - M is +0 whatever the sign of q
        bits.bitwise_and_(SIGN_BIT).bitwise_or_(spare.bits)
    else:
        q.copy_(spare.values)


# Shares


def saturated_share(x: Tensor, scale: Tensor, fmt: Format) -> float:
    """Return the share of all elements with |x / scale| > `fmt.max`, 0 to 1."""
    saturated = (x.detach() / scale).abs_() > fmt.max
    return int(saturated.count_nonzero()) / max(x.numel(), 1)


def flushed_share(x: Tensor, scale: Tensor, fmt: Format) -> float:
    """Return the share of the nonzero elements that round to zero, 0 to 1."""
    half = fmt.smallest_subnormal / 2  # itself a tie, and zero is even
    nonzero = int(x.count_nonzero())
    survivors = int(((x.detach() / scale).abs_() > half).count_nonzero())
    return (nonzero - survivors) / max(nonzero, 1)


# Bytes


def to_codes(values: Tensor, fmt: Format) -> Tensor:
    """Return the codes of `values` rounded to `fmt` (8 bits or fewer): uint8.

    Contiguous, whatever the strides of `values`: what a file may hold as it is.
    """
    # Numbers of 8 bits are bf16 numbers, so the upper half of a float32 names them.
    bits = round_to_format(values, fmt).view(torch.int32)
    upper = (bits.view(-1) >> 16).bitwise_and_(0xFFFF)
    return _code_of_upper_half(fmt).index_select(0, upper).view(values.shape)


def from_codes(codes: Tensor, fmt: Format) -> Tensor:
    """Return the float32 values of uint8 `codes` (8 bits or fewer), contiguous."""
    indices = codes.int().reshape(-1)
    return _value_of_code(fmt).index_select(0, indices).view(codes.shape)


@cache
def _value_of_code(fmt: Format) -> Tensor:
    return torch.tensor([decode(fmt, code) for code in range(1 << fmt.bits)])


@cache
def _code_of_upper_half(fmt: Format) -> Tensor:
    values = _value_of_code(fmt)
    table = torch.zeros(1 << 16, dtype=torch.uint8)
    nan = values.isnan().nonzero().flatten()[-1:].to(torch.uint8)  # none in 6 bits
    upper = torch.arange(1 << 16, dtype=torch.int32) << 16
    if len(nan):
        table[upper.view(torch.float32).isnan()] = nan
    finite = values.isfinite()
    codes = torch.arange(len(values), dtype=torch.uint8)
    table[(values[finite].view(torch.int32) >> 16) & 0xFFFF] = codes[finite]
    return table
