"""Seconds and bytes of a site and of a stack.

A decode step is `batch_size` rows against a context that grows from the prompt to
prompt + output: its time is the mean over that growth. Seconds are of measured kernels
where the tables have them and of the roofline elsewhere (`optimizer/timing.py`); each
says which, and what error to expect. Casts to FP8 are counted at the site that asks for
them; casts between 16 and 32 bits ride along in a kernel that reads the tensor anyway.

Under tensor parallelism seconds are those of one GPU's share, and the sums over the GPUs
are counted at the sites whose outputs they complete, the gather of the logits at the
head; bytes are of all GPUs together.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType

from optimizer import kernels
from optimizer.errors import HardwareError
from optimizer.hardware import Device
from optimizer.kernels import Basis, Tables
from optimizer.roofline import Frame, Step, cache_row_bytes, frame, launches, stored
from optimizer.sizes import held_bytes
from optimizer.spec import Workload
from optimizer.stack import (
    LINEAR,
    Choice,
    Component,
    ModelShape,
    Site,
    SiteShape,
    Stack,
)
from optimizer.timing import ATTENTION, Timed, timed

# How long the host takes to launch a kernel where no CUDA graph does it for all.
# aiconfigurator-core 0.12 puts vLLM's dispatch at 0.8 ms a layer, calibrated by its
# authors on whole-engine runs over many devices and models; a dense layer is 9 kernels.
# Plain PyTorch takes longer: 39 ms for the 32 layers of Llama 2 7B on an A100
# (pytorch.org/blog/accelerating-generative-ai-2), compiled 9 (torchao's README).
HOST_S = 0.8e-3 / 9
CONTEXTS = 5  # points of the growing context that a decode step is averaged over
# The least time of a sum over GPUs: that of 256 bytes over 4, H100, vLLM 0.24.
REDUCE_S = 4.5e-6
REDUCED_BYTES = 2  # of each element that GPUs add up, in 16 bits
# Sites whose outputs the GPUs add up: each has a share of the inputs, or of the table.
_REDUCED = (Component.ATTN_OUT, Component.FFN_OUT, Component.EMBEDDINGS)


@dataclass(frozen=True, slots=True)
class SiteCost:
    """What one site adds to a stack, at one choice."""

    per_token_s: float  # of one decode step: every sequence gets one token
    first_token_s: float  # of the prefill of the whole batch
    weight_bytes: int  # scales included
    kv_bytes: int  # of the whole batch, at prompt + output tokens
    basis: Basis = Basis.ROOFLINE  # of `per_token_s`
    error: float = math.nan  # relative, to expect of `per_token_s`; NaN: unknown
    first_basis: Basis = Basis.ROOFLINE
    first_error: float = math.nan


@dataclass(frozen=True, slots=True)
class StackCost:
    """The sums over a model's sites. `memory_bytes` is weights and KV cache."""

    per_token_s: float
    first_token_s: float
    weight_bytes: int
    kv_bytes: int
    memory_bytes: int
    basis: Basis  # of most of `per_token_s`
    error: float  # relative; the sites' own, weighted by their seconds
    shares: Mapping[Basis, float] = field(hash=False)  # of `per_token_s`; 1 in all
    first_basis: Basis = Basis.ROOFLINE
    first_error: float = math.nan
    first_shares: Mapping[Basis, float] = field(
        hash=False, default_factory=lambda: MappingProxyType({})
    )


def steps(workload: Workload) -> tuple[Step, tuple[Step, ...]]:
    """Return the prefill, and decode steps whose mean is that of all."""
    prompt, batch = workload.prompt_tokens, workload.batch_size
    return Step(batch, prompt, prompt), tuple(
        Step(batch, 1, prompt + workload.output_tokens * (i + 0.5) / CONTEXTS)
        for i in range(CONTEXTS)
    )


def share(shape: SiteShape, gpus: int) -> SiteShape:
    """Return what one GPU of a tensor-parallel group has of a site.

    Outputs of q, k, v, of gate and up and of the vocabulary are split, and inputs of
    what follows; norms and the router are on every GPU, but for the norms of heads.
    """
    component = shape.site.component
    whole = component in (Component.NORMS, Component.ROUTER) and not shape.heads
    if gpus == 1 or whole:
        return shape

    def part(size: int) -> int:
        return math.ceil(size / gpus)

    by_input = component in (Component.ATTN_OUT, Component.FFN_OUT)
    by_output = not by_input and component in (*LINEAR, Component.EMBEDDINGS)
    return replace(
        shape,
        n=part(shape.n) if by_output else shape.n,
        k=part(shape.k) if by_input else shape.k,
        weight_elements=part(shape.weight_elements),
        heads=part(shape.heads),
        kv_heads=part(shape.kv_heads),
        elements=shape.elements
        if component is Component.NORMS
        else part(shape.elements),
    )


def site_cost(
    shape: SiteShape,
    choice: Choice,
    device: Device,
    workload: Workload,
    model: ModelShape,
    *,
    tables: Tables | None = None,
) -> SiteCost:
    """Return what one site costs at one choice.

    `tables` are those of the device where not given. Raises HardwareError where the
    device has no rate for what the choice multiplies (ask `rules.refusals` first), and
    where nothing is known of its GPUs together.
    """
    known = tables or kernels.tables(device.id)
    alike = replace(shape, site=Site(0, shape.site.component))  # whichever the layer
    return cost_within(alike, choice, device, workload, frame(model), known)


@lru_cache(maxsize=1 << 15)
def cost_within(
    shape: SiteShape,
    choice: Choice,
    device: Device,
    workload: Workload,
    within: Frame,
    tables: Tables | None,
) -> SiteCost:
    """Return `site_cost` of a site whose layer is 0, in the frame of its model.

    `tables` None: nothing is known of the device's kernels.
    """
    prefill = replace(steps(workload)[0], every_row=within.every_row)
    first = _on(prefill, shape, choice, device, workload, within, tables)
    each = decoded(shape, choice, device, workload, within, tables)
    row = shape.k or within.hidden
    return SiteCost(
        per_token_s=each.seconds,
        first_token_s=first.seconds,
        weight_bytes=held_bytes(shape.weight_elements, row, stored(choice)),
        kv_bytes=_kv_bytes(shape, choice, workload),
        basis=each.basis,
        error=each.error,
        first_basis=first.basis,
        first_error=first.error,
    )


@lru_cache(maxsize=1 << 15)
def decoded(
    shape: SiteShape,
    choice: Choice,
    device: Device,
    workload: Workload,
    within: Frame,
    tables: Tables | None,
) -> Timed:
    """Return the seconds of a decode step alone, as `cost_within` has them."""
    if shape.site.component not in ATTENTION:
        # Its time does not depend on the context: it is remembered for all of them.
        any_context = Step(workload.batch_size, 1, 1)
        return _on(any_context, shape, choice, device, workload, within, tables)
    _, decode = steps(workload)
    return _mean(
        [_on(s, shape, choice, device, workload, within, tables) for s in decode]
    )


def _on(
    step: Step,
    whole: SiteShape,
    choice: Choice,
    device: Device,
    workload: Workload,
    within: Frame,
    tables: Tables | None,
) -> Timed:
    """Return the seconds of one GPU's share in a step, and of what GPUs exchange."""
    shape = share(whole, workload.tensor_parallel)
    found = timed(shape, choice, device, step, within, tables)
    if not workload.cuda_graphs:
        launched = launches(shape, choice, within.hidden) * HOST_S
        found = replace(found, seconds=max(found.seconds, launched))
    size = _exchanged(whole, step, within)
    if workload.tensor_parallel > 1 and size:
        added = _all_reduce_s(workload.tensor_parallel, size, device, tables)
        found = replace(found, seconds=found.seconds + added)
    return found


def _exchanged(shape: SiteShape, step: Step, within: Frame) -> int:
    """Return the bytes of which an all-reduce takes as long as what GPUs exchange.

    Logits are gathered, each GPU's part of the vocabulary by all of them: half of the
    traffic of a sum of as many bytes, which gathers what it has first added up.
    """
    rows = step.rows(shape.site.component)
    if shape.site.component is Component.LM_HEAD:
        return math.ceil(rows * shape.n * REDUCED_BYTES / 2)
    reduced = shape.site.component in _REDUCED
    return step.tokens * within.hidden * REDUCED_BYTES if reduced else 0


def _mean(found: list[Timed]) -> Timed:
    """Return the mean seconds, as good as the weakest of them."""
    weakest = Basis.ROOFLINE if any(t.basis is Basis.ROOFLINE for t in found) else None
    return Timed(
        math.fsum(t.seconds for t in found) / len(found),
        weakest or found[0].basis,
        max(t.error for t in found),
    )


def _all_reduce_s(gpus: int, size: int, device: Device, tables: Tables | None) -> float:
    """Return the seconds of a sum over GPUs, in pieces no larger than was measured.

    Where nothing was: each sends and receives 2 (gpus - 1) / gpus of it over its link.
    """
    grid = tables.reductions.get(gpus) if tables else None
    if grid is None or tables is None:
        if not device.link_bytes_s:
            raise HardwareError(f"{device.name} has no link to {gpus - 1} others")
        return REDUCE_S + 2 * (gpus - 1) / gpus * size / device.link_bytes_s
    smallest, largest = grid.axes[0][0], grid.axes[0][-1]
    pieces = math.ceil(size / largest)
    found = tables.all_reduce(gpus, max(math.ceil(size / pieces), smallest))
    assert found is not None, "within the axis, of which every point is known"
    return pieces * found.seconds


def _kv_bytes(shape: SiteShape, choice: Choice, workload: Workload) -> int:
    if shape.site.component is not Component.KV_CACHE:
        return 0
    tokens = workload.prompt_tokens + workload.output_tokens
    held = tokens if shape.window is None else min(tokens, shape.window)
    return math.ceil(workload.batch_size * held * cache_row_bytes(shape, choice))


def _shape(model: ModelShape, component: Component) -> SiteShape:
    return next(s for s in model.sites if s.site.component is component)


def tied_bytes(model: ModelShape, embeddings: Choice, lm_head: Choice) -> int:
    """Return the weight bytes of both: once where tied weights agree in precision.

    They are two tensors, both stored, where they disagree or were never tied.
    """
    table, head = (
        held_bytes(shape.weight_elements, shape.k or model.hidden, stored(choice))
        for shape, choice in (
            (_shape(model, Component.EMBEDDINGS), embeddings),
            (_shape(model, Component.LM_HEAD), lm_head),
        )
    )
    shared = model.tied_embeddings and stored(embeddings) == stored(lm_head)
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
    model: ModelShape,
    stack: Stack,
    device: Device,
    workload: Workload,
    *,
    tables: Tables | None = None,
) -> StackCost:
    """Return the cost of a whole stack: the sum over its sites.

    Raises KeyError for a site that the stack does not decide, HardwareError as
    `site_cost` does.
    """
    costs = [
        site_cost(s, stack.choices[s.site], device, workload, model, tables=tables)
        for s in model.sites
    ]
    weights = sum(c.weight_bytes for c in costs) - _untied_excess(model, stack)
    cache = sum(c.kv_bytes for c in costs)
    each = _summed([Timed(c.per_token_s, c.basis, c.error) for c in costs])
    first = _summed(
        [Timed(c.first_token_s, c.first_basis, c.first_error) for c in costs]
    )
    return StackCost(
        per_token_s=each.seconds,
        first_token_s=first.seconds,
        weight_bytes=weights,
        kv_bytes=cache,
        memory_bytes=weights + cache,
        basis=each.basis,
        error=each.error,
        shares=each.shares,
        first_basis=first.basis,
        first_error=first.error,
        first_shares=first.shares,
    )


@dataclass(frozen=True, slots=True)
class Summed:
    """Seconds of several sites, and where they come from."""

    seconds: float
    basis: Basis  # of most of them
    error: float
    shares: Mapping[Basis, float] = field(hash=False)


def _summed(parts: Sequence[Timed]) -> Summed:
    # Exactly rounded, so that equal sites in another order are an equal stack.
    total = math.fsum(t.seconds for t in parts)
    by_basis = {b: math.fsum(t.seconds for t in parts if t.basis is b) for b in Basis}
    shares = {b: s / total for b, s in by_basis.items() if s}
    # The errors of alike kernels go the same way: they are added, not their squares.
    error = math.fsum(t.seconds * t.error for t in parts) / total
    return Summed(
        total, max(shares, key=lambda b: shares[b]), error, MappingProxyType(shares)
    )


def fits(cost: StackCost, device: Device) -> bool:
    """Whether weights and KV cache fit the device's memory; activations are not counted."""
    return cost.memory_bytes <= device.memory_bytes
