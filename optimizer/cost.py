"""Seconds and bytes of a site and of a stack, from first principles: the roofline.

A kernel takes as long as whichever runs out first, compute or bandwidth, plus its
launch. A decode step is `batch_size` rows against a context that grows from the
prompt to prompt + output, so it is timed at the mean. Casts to FP8 are counted at
the site that asks for them; casts between 16 and 32 bits ride along in a kernel
that reads the tensor anyway. Every figure here is modelled, none is measured.

The attention of a layer is one kernel, whose bytes and products are shared out so
that the sum over sites counts each once. `kv_cache` has the bytes of K and V: those
that a decode step reads, those that are written for the new tokens, and those that
stay in memory. `attn_scores` has the products of QKᵀ and the bytes of Q,
`attn_values` the products of PV and the bytes of the output. The shares add up to a
little more than the kernel, in which products hide behind the cache at decode (0.4 %
of its time for each query head that shares a KV head, on an H100) and, at prefill,
reading K and V hides behind the products: there it is free.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from optimizer.errors import HardwareError
from optimizer.formats import FORMATS
from optimizer.hardware import LOCAL, Device
from optimizer.sizes import held_bytes, size_bytes
from optimizer.spec import Workload
from optimizer.stack import (
    LINEAR,
    Choice,
    Component,
    ModelShape,
    Precision,
    SiteShape,
    Stack,
)

# The pass to FP8 reads 2 bytes and writes 1 for every element; less than 1 in fewer
# bits, which is not taken off.
QUANTIZE_BYTES = 3


@dataclass(frozen=True, slots=True)
class Fit:
    """What is left of a data sheet in practice."""

    bandwidth_share: float  # of the peak, in a kernel that only streams
    compute_share: float  # of the dense peak, in a large matmul
    launch_s: float  # of one kernel
    quantize_s: float  # of one pass to FP8, beside its bytes


HOPPER = Fit(
    # The first, third and fourth number: least squares in relative error on eight
    # GEMMs of one token, vLLM 0.24 on an H100 (in test_cost.py); rounded, within 7 %.
    bandwidth_share=0.88,
    compute_share=0.7,  # an assumption: large cuBLAS GEMMs run at 0.6 to 0.8 of peak
    launch_s=3.3e-6,
    quantize_s=4.6e-6,
)
BLACKWELL = Fit(
    # Hopper's shares; the fixed costs solve one row, 4096×4096 on a B200 in vLLM 0.24:
    # 9.7 µs in bf16 and 24.7 µs in FP8. One row: good for "FP8 is slower here" only.
    bandwidth_share=0.88,
    compute_share=0.7,
    launch_s=4.7e-6,
    quantize_s=17.5e-6,
)
MEASURED = Fit(
    # A worker's own peaks are already what its kernels reach.
    bandwidth_share=1.0,
    compute_share=1.0,
    launch_s=3.3e-6,  # an assumption: as a GPU's
    quantize_s=4.6e-6,
)
_FITS = MappingProxyType({"10.0": BLACKWELL})  # by compute capability; else Hopper's


@dataclass(frozen=True, slots=True)
class SiteCost:
    """What one site adds to a stack, at one choice."""

    per_token_s: float  # of one decode step: every sequence gets one token
    first_token_s: float  # of the prefill of the whole batch
    weight_bytes: int  # scales included
    kv_bytes: int  # of the whole batch, at prompt + output tokens


@dataclass(frozen=True, slots=True)
class StackCost:
    """The sums over a model's sites. `memory_bytes` is weights and KV cache."""

    per_token_s: float
    first_token_s: float
    weight_bytes: int
    kv_bytes: int
    memory_bytes: int


def fit(device: Device) -> Fit:
    """Return the efficiencies and fixed costs that go with a device."""
    if device.id == LOCAL:
        return MEASURED
    return _FITS.get(device.compute_capability or "", HOPPER)


def matmul_flops(m: int, n: int, k: int) -> int:
    """Count a multiply and an add for each of the m·n·k terms."""
    return 2 * m * n * k


def roofline_s(
    flops: float, bytes_moved: float, peak: float, bandwidth: float
) -> float:
    """Return the time of whichever runs out first: `peak` FLOP/s or bytes/s."""
    return max(flops / peak, bytes_moved / bandwidth)


@dataclass(frozen=True, slots=True)
class _Step:
    """One forward pass: the prefill of a batch, or one decode step of it."""

    sequences: int
    queries: int  # tokens of each sequence that go through
    context: float  # tokens that the last of them looks at

    @property
    def tokens(self) -> int:
        return self.sequences * self.queries

    def keys(self, window: int | None) -> float:
        """Tokens of one sequence whose K and V a decode step reads."""
        return self.context if window is None else min(self.context, window)

    def pairs(self, window: int | None) -> float:
        """Query-key pairs of one sequence under a causal mask."""
        seen = self.context if window is None else min(self.context, window)
        if self.queries == 1:
            return seen
        return seen * (seen + 1) / 2 + (self.context - seen) * seen


def _steps(workload: Workload) -> tuple[_Step, _Step]:
    """Return the prefill and the mean decode step."""
    prompt, batch = workload.prompt_tokens, workload.batch_size
    mean = prompt + workload.output_tokens / 2
    return _Step(batch, prompt, prompt), _Step(batch, 1, mean)


def _peak(device: Device, choice: Choice) -> float:
    # Weight-only FP8 widens the weight and computes in the format of the input.
    fmt = "fp8" if choice.input.format.startswith("fp8") else choice.input.format
    if fmt not in device.peak_flops:
        raise HardwareError(f"{device.name} has no {fmt} matmul: {choice.name}")
    return device.peak_flops[fmt]


def _kernel_s(flops: float, bytes_moved: float, peak: float, device: Device) -> float:
    """Return the roofline of what a device reaches in practice, without the launch."""
    reached = fit(device)
    return roofline_s(
        flops,
        bytes_moved,
        peak * reached.compute_share,
        device.bandwidth_bytes_s * reached.bandwidth_share,
    )


def quantize_s(elements: int, precision: Precision, device: Device) -> float:
    """Return the seconds of the pass that brings `elements` to FP8; 0 for 16 bits."""
    if not FORMATS[precision.format].scaled:
        return 0.0
    moved = _kernel_s(0, QUANTIZE_BYTES * elements, 1.0, device)
    return moved + fit(device).quantize_s


def _stored(choice: Choice) -> Precision:
    return choice.weight or choice.input


def _read_elements(shape: SiteShape, rows: int) -> int:
    """Weight elements that `rows` tokens read: of experts, those that one of them needs.

    An expert that a token reaches with probability p stays idle with (1 - p)^rows, if
    the router is even and every token independent.
    """
    if shape.active_share == 1.0:
        return shape.n * shape.k
    idle = (1 - shape.active_share) ** rows
    return round(shape.weight_elements * (1 - idle))


def _linear_s(
    shape: SiteShape, choice: Choice, device: Device, step: _Step, model: ModelShape
) -> float:
    """A GEMM of rows × k by k × n, with the pass that narrows its input."""
    last_only = shape.site.component is Component.LM_HEAD
    rows = step.sequences if last_only else step.tokens
    moved = (
        held_bytes(_read_elements(shape, rows), shape.k, _stored(choice))
        + rows * shape.k * size_bytes(choice.input.format)
        + rows * shape.n * size_bytes(choice.output)
    )
    flops = matmul_flops(rows, shape.n, shape.k)
    return (
        _kernel_s(flops, moved, _peak(device, choice), device)
        + fit(device).launch_s
        + quantize_s(rows * shape.k, choice.input, device)
    )


def _attention_s(
    shape: SiteShape, choice: Choice, device: Device, step: _Step, row_bytes: float
) -> float:
    """One of the two GEMMs in the fused kernel, without the cache.

    `row_bytes` is the size of an element of Q, or of the output.
    """
    width = shape.heads * shape.head_dim
    moved = step.tokens * width * row_bytes
    flops = 2 * step.sequences * step.pairs(shape.window) * width
    return _kernel_s(flops, moved, _peak(device, choice), device)


def _scores_s(
    shape: SiteShape, choice: Choice, device: Device, step: _Step, model: ModelShape
) -> float:
    """QKᵀ, the launch of the fused kernel, and the pass that narrows Q."""
    queries = step.tokens * shape.heads * shape.head_dim
    return (
        _attention_s(shape, choice, device, step, size_bytes(choice.input.format))
        + fit(device).launch_s
        + quantize_s(queries, choice.input, device)
    )


def _values_s(
    shape: SiteShape, choice: Choice, device: Device, step: _Step, model: ModelShape
) -> float:
    """PV. P is narrowed in registers: no pass."""
    return _attention_s(shape, choice, device, step, size_bytes(choice.output))


def _cache_row_bytes(shape: SiteShape, choice: Choice) -> float:
    """Bytes of K and V of one token. Their scales, static, are a few bytes a layer."""
    element = size_bytes(choice.input.format) + size_bytes(_stored(choice).format)
    return shape.kv_heads * shape.head_dim * element


def _cache_s(
    shape: SiteShape, choice: Choice, device: Device, step: _Step, model: ModelShape
) -> float:
    """K and V written for each token, narrowed on the way, and read by a decode step."""
    read = step.sequences * step.keys(shape.window) if step.queries == 1 else 0
    moved = (read + step.tokens) * _cache_row_bytes(shape, choice)
    return _kernel_s(0, moved, 1.0, device)


def _softmax_s(
    shape: SiteShape, choice: Choice, device: Device, step: _Step, model: ModelShape
) -> float:
    """Nothing, whatever the choice: it overlaps with the GEMMs that it is fused with.

    So FP8 here never looks faster, which no kernel known to us contradicts.
    """
    return 0.0


def _elementwise_s(
    shape: SiteShape, choice: Choice, device: Device, step: _Step, model: ModelShape
) -> float:
    """Every element in and out once; one kernel for each row of hidden states.

    (The two norms of a layer are two kernels.) FP8 input costs the pass to FP8.
    """
    elements = step.tokens * shape.elements
    moved = elements * (size_bytes(choice.input.format) + size_bytes(choice.output))
    is_norm = shape.site.component is Component.NORMS
    kernels = max(1, shape.elements // model.hidden) if is_norm else 1
    return (
        _kernel_s(0, moved, 1.0, device)
        + kernels * fit(device).launch_s
        + quantize_s(elements, choice.input, device)
    )


def _embeddings_s(
    shape: SiteShape, choice: Choice, device: Device, step: _Step, model: ModelShape
) -> float:
    """A gather of one row for each token."""
    width = size_bytes(_stored(choice).format) + size_bytes(choice.output)
    moved = step.tokens * model.hidden * width
    return _kernel_s(0, moved, 1.0, device) + fit(device).launch_s


_Seconds = Callable[[SiteShape, Choice, Device, _Step, ModelShape], float]
_SECONDS: Mapping[Component, _Seconds] = MappingProxyType(
    {
        **dict.fromkeys((*LINEAR, Component.ROUTER), _linear_s),
        Component.EMBEDDINGS: _embeddings_s,
        Component.KV_CACHE: _cache_s,
        Component.ATTN_SCORES: _scores_s,
        Component.ATTN_SOFTMAX: _softmax_s,
        Component.ATTN_VALUES: _values_s,
        Component.FFN_ACT: _elementwise_s,
        Component.NORMS: _elementwise_s,
    }
)


def _kv_bytes(shape: SiteShape, choice: Choice, workload: Workload) -> int:
    if shape.site.component is not Component.KV_CACHE:
        return 0
    tokens = workload.prompt_tokens + workload.output_tokens
    held = tokens if shape.window is None else min(tokens, shape.window)
    return math.ceil(workload.batch_size * held * _cache_row_bytes(shape, choice))


def site_cost(
    shape: SiteShape,
    choice: Choice,
    device: Device,
    workload: Workload,
    model: ModelShape,
) -> SiteCost:
    """Return what one site costs at one choice.

    Raises HardwareError where the device has no rate for what the choice multiplies:
    ask `hardware.refusals` first.
    """
    seconds = _SECONDS[shape.site.component]
    prefill, decode = _steps(workload)
    row = shape.k or model.hidden
    return SiteCost(
        per_token_s=seconds(shape, choice, device, decode, model),
        first_token_s=seconds(shape, choice, device, prefill, model),
        weight_bytes=held_bytes(shape.weight_elements, row, _stored(choice)),
        kv_bytes=_kv_bytes(shape, choice, workload),
    )


def _shape(model: ModelShape, component: Component) -> SiteShape:
    return next(s for s in model.sites if s.site.component is component)


def tied_bytes(model: ModelShape, embeddings: Choice, lm_head: Choice) -> int:
    """Return the weight bytes of both: once where tied weights agree in precision.

    They are two tensors, both stored, where they disagree or were never tied.
    """
    table, head = (
        held_bytes(shape.weight_elements, shape.k or model.hidden, _stored(choice))
        for shape, choice in (
            (_shape(model, Component.EMBEDDINGS), embeddings),
            (_shape(model, Component.LM_HEAD), lm_head),
        )
    )
    shared = model.tied_embeddings and _stored(embeddings) == _stored(lm_head)
    return table if shared else table + head


def _untied_excess(model: ModelShape, stack: Stack) -> int:
    """Bytes that the sum over sites counts twice, since two sites share a tensor."""
    if not model.tied_embeddings:
        return 0
    ends = (Component.EMBEDDINGS, Component.LM_HEAD)
    choices = [stack.choices[_shape(model, c).site] for c in ends]
    apart = tied_bytes(replace(model, tied_embeddings=False), *choices)
    return apart - tied_bytes(model, *choices)


def stack_cost(
    model: ModelShape, stack: Stack, device: Device, workload: Workload
) -> StackCost:
    """Return the cost of a whole stack: the sum over its sites.

    Raises KeyError for a site that the stack does not decide, HardwareError as
    `site_cost` does.
    """
    costs = [
        site_cost(s, stack.choices[s.site], device, workload, model)
        for s in model.sites
    ]
    weights = sum(c.weight_bytes for c in costs) - _untied_excess(model, stack)
    cache = sum(c.kv_bytes for c in costs)
    return StackCost(
        # Exactly rounded, so that equal sites in another order are an equal stack.
        per_token_s=math.fsum(c.per_token_s for c in costs),
        first_token_s=math.fsum(c.first_token_s for c in costs),
        weight_bytes=weights,
        kv_bytes=cache,
        memory_bytes=weights + cache,
    )


def fits(cost: StackCost, device: Device) -> bool:
    """Whether weights and KV cache fit the device's memory; activations are not counted."""
    return cost.memory_bytes <= device.memory_bytes
