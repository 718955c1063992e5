"""Seconds of a site from first principles: the roofline.

A kernel takes as long as whichever runs out first, compute or bandwidth, plus a fixed
time. What of the data sheet each kind of kernel reaches is a `Fit` (`optimizer/fits.py`);
under `IDEAL` it reaches all of it, and that is the limit that no figure may beat.

The attention of a layer is one kernel, whose bytes and products are shared out so that
the sum over sites counts each once. `kv_cache` has the bytes of K and V: those that a
decode step reads, those that are rotated and written for the new tokens (two kernels),
and those that stay in memory. `attn_scores` has the products of QKᵀ, the bytes of Q and
the fixed time, `attn_values` the products of PV and the bytes of the output. The shares
add up to a little more than the kernel, in which products hide behind the cache at
decode (0.4 % of its time for each query head that shares a KV head, on an H100) and, at
prefill, reading K and V hides behind the products: there it is free.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from optimizer.errors import HardwareError
from optimizer.fits import IDEAL, Fit, Kernel
from optimizer.formats import FORMATS
from optimizer.hardware import Device
from optimizer.sizes import held_bytes, size_bytes
from optimizer.stack import (
    LINEAR,
    Choice,
    Component,
    Granularity,
    ModelShape,
    Precision,
    SiteShape,
)

# The pass to FP8 reads 2 bytes and writes 1 for every element; less than 1 in fewer
# bits, which is not taken off.
QUANTIZE_BYTES = 3
HEAD_NORMS = 2  # kernels: of Q, and of K
ROTATE_AND_WRITE = 2  # kernels between the fused q, k, v and attention


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: the prefill of a batch, or one decode step of it."""

    sequences: int
    queries: int  # tokens of each sequence that go through
    context: float  # tokens that the last of them looks at
    every_row: bool = False  # of an encoder: the head answers at every position

    @property
    def tokens(self) -> int:
        """Tokens of all sequences that go through."""
        return self.sequences * self.queries

    def rows(self, component: Component) -> int:
        """Rows that go through a matrix: in a decoder's lm_head the last position's."""
        last_only = component is Component.LM_HEAD and not self.every_row
        return self.sequences if last_only else self.tokens

    def keys(self, window: int | None) -> float:
        """Tokens of one sequence whose K and V a decode step reads."""
        return self.context if window is None else min(self.context, window)

    def pairs(self, window: int | None) -> float:
        """Query-key pairs of one sequence under a causal mask."""
        seen = self.context if window is None else min(self.context, window)
        if self.queries == 1:
            return seen
        return seen * (seen + 1) / 2 + (self.context - seen) * seen


def matmul_flops(m: int, n: int, k: int) -> int:
    """Count a multiply and an add for each of the m·n·k terms."""
    return 2 * m * n * k


def roofline_s(
    flops: float, bytes_moved: float, peak: float, bandwidth: float
) -> float:
    """Return the time of whichever runs out first: `peak` FLOP/s or bytes/s."""
    return max(flops / peak, bytes_moved / bandwidth)


@dataclass(frozen=True, slots=True)
class Frame:
    """What a site has to know of its model."""

    hidden: int
    gated: bool = False  # the activation reads two halves and multiplies them
    every_row: bool = False  # the head answers at every position


def frame(model: ModelShape) -> Frame:
    """Return the frame of a model's sites; its first feed-forward network tells."""
    ends = (Component.FFN_IN, Component.FFN_OUT)
    inner, outer = (
        next((s for s in model.sites if s.site.component is c), None) for c in ends
    )
    gated = inner is not None and outer is not None and inner.n > outer.k
    return Frame(model.hidden, gated, model.every_row)


def seconds(
    shape: SiteShape,
    choice: Choice,
    device: Device,
    step: Step,
    within: Frame,
    fit: Fit,
) -> float:
    """Return the seconds of one site in one step.

    Raises HardwareError where the device has no rate for what the choice multiplies:
    ask `rules.refusals` first.
    """
    return _SECONDS[shape.site.component](
        _Work(shape, choice, device, step, within, fit)
    )


def written_s(
    shape: SiteShape,
    choice: Choice,
    device: Device,
    step: Step,
    within: Frame,
    fit: Fit,
) -> float:
    """Return the part of `kv_cache` that is not in the attention kernel."""
    return _written_s(_Work(shape, choice, device, step, within, fit))


def least_s(shape: SiteShape, choice: Choice, device: Device, step: Step) -> float:
    """Return the physical limit: the bytes that a site must move, or its products.

    Inputs and outputs are not counted: a kernel may find them in a cache. 0 for what
    can be part of another kernel.
    """
    component = shape.site.component
    work = _Work(shape, choice, device, step, Frame(0), IDEAL)
    match component:
        case Component.KV_CACHE:
            read = step.sequences * step.keys(shape.window) * (step.queries == 1)
            held = (read + step.tokens) * cache_row_bytes(shape, choice)
            return held / device.bandwidth_bytes_s
        case Component.ATTN_SCORES | Component.ATTN_VALUES:
            return _products_s(work, 0)
        case _ if component in LINEAR or component is Component.ROUTER:
            rows = step.rows(component)
            read = _read_elements(shape, rows) * size_bytes(stored(choice).format)
            flops = matmul_flops(rows, shape.n, shape.k)
            return work.kernel_s(flops, read, IDEAL.gemm("bf16"))
        case _:
            return 0.0


def launches(shape: SiteShape, choice: Choice, hidden: int) -> int:
    """Return how many kernels the host launches for a site in one step."""
    component = shape.site.component
    match component:
        case Component.ATTN_SOFTMAX | Component.ATTN_VALUES:
            return 0  # in the kernel of the scores
        case Component.NORMS:
            return _norms(shape, hidden)
        case Component.KV_CACHE:
            return ROTATE_AND_WRITE
        case _:
            return 1 + FORMATS[choice.input.format].scaled


def quantize_s(elements: int, precision: Precision, device: Device, fit: Fit) -> float:
    """Return the seconds of the pass that brings `elements` to FP8; 0 for 16 bits."""
    if not FORMATS[precision.format].scaled:
        return 0.0
    static = precision.granularity in (Granularity.TENSOR, Granularity.HEAD)
    kernel = fit.stream if static else fit.scaled
    return _stream_s(QUANTIZE_BYTES * elements, device, kernel)


def moved_s(count: float, device: Device, fit: Fit) -> float:
    """Return the seconds of so many bytes in an elementwise kernel, its launch aside."""
    return count / (device.bandwidth_bytes_s * fit.stream.bandwidth_share)


def stored(choice: Choice) -> Precision:
    """Return what a site's weights are held in."""
    return choice.weight or choice.input


def cache_row_bytes(shape: SiteShape, choice: Choice) -> float:
    """Bytes of K and V of one token. Their scales, static, are a few bytes a layer."""
    element = size_bytes(choice.input.format) + size_bytes(stored(choice).format)
    return shape.kv_heads * shape.head_dim * element


@dataclass(frozen=True, slots=True)
class _Work:
    """What a site's seconds are a function of."""

    shape: SiteShape
    choice: Choice
    device: Device
    step: Step
    within: Frame
    fit: Fit

    def peak(self) -> float:
        # Weight-only FP8 widens the weight and computes in the format of the input.
        fmt = self.choice.input.format
        fmt = "fp8" if fmt.startswith("fp8") else fmt
        if fmt not in self.device.peak_flops:
            raise HardwareError(
                f"{self.device.name} has no {fmt} matmul: {self.choice.name}"
            )
        return self.device.peak_flops[fmt]

    def kernel_s(self, flops: float, bytes_moved: float, kernel: Kernel) -> float:
        """Return the roofline of what a kernel reaches, its fixed time aside."""
        return roofline_s(
            flops,
            bytes_moved,
            self.peak() * kernel.compute_share,
            self.device.bandwidth_bytes_s * kernel.bandwidth_share,
        )


def _stream_s(bytes_moved: float, device: Device, kernel: Kernel) -> float:
    return kernel.fixed_s + bytes_moved / (
        device.bandwidth_bytes_s * kernel.bandwidth_share
    )


def _read_elements(shape: SiteShape, rows: int) -> int:
    """Weight elements that `rows` tokens read: of experts, those that one of them needs.

    An expert that a token reaches with probability p stays idle with (1 - p)^rows, if
    the router is even and every token independent.
    """
    if shape.active_share == 1.0:
        return shape.n * shape.k
    idle = (1 - shape.active_share) ** rows
    return round(shape.weight_elements * (1 - idle))


def _linear_s(work: _Work) -> float:
    """A GEMM of rows × k by k × n, with the pass that narrows its input."""
    shape, choice = work.shape, work.choice
    rows = work.step.rows(shape.site.component)
    moved = (
        held_bytes(_read_elements(shape, rows), shape.k, stored(choice))
        + rows * shape.k * size_bytes(choice.input.format)
        + rows * shape.n * size_bytes(choice.output)
    )
    kernel = work.fit.gemm(gemm_format(choice))
    return (
        work.kernel_s(matmul_flops(rows, shape.n, shape.k), moved, kernel)
        + kernel.fixed_s
        + quantize_s(rows * shape.k, choice.input, work.device, work.fit)
    )


def gemm_format(choice: Choice) -> str:
    """Return what the kernel tables call the product of a linear site's operands."""
    fmt, granularity = choice.input.format, choice.input.granularity
    if fmt.startswith("fp8"):
        return "fp8_block" if granularity is Granularity.GROUP else "fp8"
    return "nvfp4" if granularity is Granularity.NV else fmt


def _products_s(work: _Work, row_bytes: float) -> float:
    """One of the two GEMMs in the fused kernel, without the cache.

    `row_bytes` is the size of an element of Q, or of the output.
    """
    shape, step = work.shape, work.step
    width = shape.heads * shape.head_dim
    moved = step.tokens * width * row_bytes
    flops = 2 * step.sequences * step.pairs(shape.window) * width
    return work.kernel_s(flops, moved, _attention(work))


def _attention(work: _Work) -> Kernel:
    return work.fit.generation if work.step.queries == 1 else work.fit.context


def _scores_s(work: _Work) -> float:
    """QKᵀ, the fixed time of the fused kernel, and the pass that narrows Q."""
    shape, given = work.shape, work.choice.input
    queries = work.step.tokens * shape.heads * shape.head_dim
    return (
        _products_s(work, size_bytes(given.format))
        + _attention(work).fixed_s
        + quantize_s(queries, given, work.device, work.fit)
    )


def _values_s(work: _Work) -> float:
    """PV. P is narrowed in registers: no pass."""
    return _products_s(work, size_bytes(work.choice.output))


def _cache_s(work: _Work) -> float:
    """K and V rotated, written for each token (narrowed on the way) and read at decode."""
    return _read_s(work) + _written_s(work)


def _read_s(work: _Work) -> float:
    shape, step = work.shape, work.step
    read = step.sequences * step.keys(shape.window) if step.queries == 1 else 0
    reached = work.device.bandwidth_bytes_s * work.fit.generation.bandwidth_share
    return read * cache_row_bytes(shape, work.choice) / reached


def _written_s(work: _Work) -> float:
    shape, step = work.shape, work.step
    width = (shape.heads + shape.kv_heads) * shape.head_dim  # of q and k, in 16 bits
    rotated = 4 * step.tokens * width
    copied = 4 * step.tokens * shape.kv_heads * shape.head_dim  # K and V are read
    held = step.tokens * cache_row_bytes(shape, work.choice)
    moved = moved_s(rotated + copied + held, work.device, work.fit)
    return moved + ROTATE_AND_WRITE * work.fit.stream.fixed_s


def _softmax_s(work: _Work) -> float:
    """Nothing, whatever the choice: it overlaps with the GEMMs that it is fused with.

    So FP8 here never looks faster, which no kernel known to us contradicts.
    """
    return 0.0


def _act_s(work: _Work) -> float:
    """The activation's inputs in, its outputs out. FP8 input costs the pass to FP8."""
    shape, choice, fit = work.shape, work.choice, work.fit
    elements = work.step.tokens * shape.elements
    read = (1 + work.within.gated) * size_bytes(choice.input.format)
    moved = elements * (read + size_bytes(choice.output))
    return _stream_s(moved, work.device, fit.stream) + quantize_s(
        elements, choice.input, work.device, fit
    )


def _norms(shape: SiteShape, hidden: int) -> int:
    return max(1, shape.elements // hidden) + (HEAD_NORMS if shape.heads else 0)


def _norms_s(work: _Work) -> float:
    """Two kernels in a layer: each adds to the residual stream, and normalizes it.

    Input and residual are read, the sum and its normal form are written. Where Q and K
    are normalized by head, a kernel for each reads them and writes them back.
    """
    shape, choice, fit = work.shape, work.choice, work.fit
    width = size_bytes(choice.input.format) + size_bytes(choice.output)
    by_head = (shape.heads + shape.kv_heads) * shape.head_dim
    moved = work.step.tokens * (2 * shape.elements + by_head) * width
    fixed = (_norms(shape, work.within.hidden) - 1) * fit.stream.fixed_s
    return _stream_s(moved, work.device, fit.stream) + fixed


def _embeddings_s(work: _Work) -> float:
    """A gather of one row for each token."""
    width = size_bytes(stored(work.choice).format) + size_bytes(work.choice.output)
    moved = work.step.tokens * work.within.hidden * width
    return _stream_s(moved, work.device, work.fit.stream)


_SECONDS: Mapping[Component, Callable[[_Work], float]] = MappingProxyType(
    {
        **dict.fromkeys((*LINEAR, Component.ROUTER), _linear_s),
        Component.EMBEDDINGS: _embeddings_s,
        Component.KV_CACHE: _cache_s,
        Component.ATTN_SCORES: _scores_s,
        Component.ATTN_SOFTMAX: _softmax_s,
        Component.ATTN_VALUES: _values_s,
        Component.FFN_ACT: _act_s,
        Component.NORMS: _norms_s,
    }
)
