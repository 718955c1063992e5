"""The worker's own device, measured: `hardware: "local"`.

Every distinct (shape, choice) of the model is run and timed at the workload's
decode step and prefill. What comes out is a sum of measured kernels, not a run of
the whole model: that is `local_prices`, where the model can be run.
"""

import platform
import statistics
import time
from collections.abc import Callable
from functools import cache
from types import MappingProxyType

import psutil
import torch
from torch import Tensor
from torch.nn import functional

from optimizer.casts import CastCost, Casts, Pair, neighbors
from optimizer.cost import SiteCost, site_cost
from optimizer.formats import E4M3
from optimizer.hardware import LOCAL, Device
from optimizer.kernels import Basis
from optimizer.native import widened
from optimizer.quantize import to_codes
from optimizer.spec import Workload
from optimizer.stack import LINEAR, Choice, Component, ModelShape, SiteShape

REPEATS = 5
LONG_S = 0.25  # a call that takes longer is timed once, after the one that warms up
PEAK_SIDE = {"fp32": 1024, "bf16": 256}  # small in bf16: some CPUs take 1000× longer
STREAM_BYTES = 1 << 27  # far beyond any cache
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

CostOf = Callable[[SiteShape, Choice], SiteCost]
Op = Callable[[], Tensor]


@torch.no_grad()
def seconds(op: Op) -> float:
    """Return the median time of a call, after one that warms up."""
    return statistics.median(_times(op))


def _times(op: Op) -> list[float]:
    _once(op)  # compiles kernels, and touches memory for the first time
    first = _once(op)
    if first > LONG_S:
        return [first]
    return [first, *(_once(op) for _ in range(REPEATS - 1))]


@torch.no_grad()
def _least_s(op: Op) -> float:
    """Return the shortest time of a call: what other work on the machine did not slow."""
    return min(_times(op))


def _once(op: Op) -> float:
    start = time.perf_counter()
    op()
    return time.perf_counter() - start


def device() -> Device:
    """Measure peaks and bandwidth of this processor and describe it as a device."""
    peaks = {}
    for fmt, side in PEAK_SIDE.items():
        a = torch.ones(side, side, dtype=DTYPES[fmt])
        peaks[fmt] = 2 * side**3 / _least_s(lambda a=a: a @ a)  # type: ignore[misc]
    here, there = torch.ones(2, STREAM_BYTES, dtype=torch.uint8)
    bandwidth = 2 * STREAM_BYTES / _least_s(lambda: there.copy_(here))  # in and out
    return Device(
        id=LOCAL,
        name=f"this machine: {platform.machine()} CPU, {torch.get_num_threads()} threads",
        arch=platform.machine(),
        peak_flops=MappingProxyType(peaks),
        bandwidth_bytes_s=bandwidth,
        memory_bytes=psutil.virtual_memory().total,
        native=frozenset(peaks),
        notes=("a sum of kernels that were run one by one",),
    )


def measured(model: ModelShape, local: Device, workload: Workload) -> CostOf:
    """Return a cost function whose seconds are measured here, each shape once."""
    known: dict[tuple[object, ...], tuple[float, float]] = {}

    def cost_of(shape: SiteShape, choice: Choice) -> SiteCost:
        bytes_of = site_cost(shape, choice, local, workload, model)
        sizes = (shape.n, shape.k, shape.heads, shape.elements, shape.window)
        key = (shape.site.component, sizes, choice.name)
        if key not in known:
            known[key] = _both(model, shape, choice, workload)
        per_token_s, first_token_s = known[key]
        return SiteCost(
            per_token_s,
            first_token_s,
            bytes_of.weight_bytes,
            bytes_of.kv_bytes,
            basis=Basis.MEASURED,
            first_basis=Basis.MEASURED,
        )

    return cost_of


def casts(model: ModelShape, workload: Workload) -> Casts:
    """Return what it costs here to hand on another format than is read, each size once."""
    shapes = {s.site: s for s in model.sites}
    batch, prompt = workload.batch_size, workload.prompt_tokens

    @cache
    def cast_s(rows: int, width: int, given: str, wanted: str) -> float:
        x = torch.zeros(rows, width, dtype=DTYPES[given])
        return seconds(lambda: x.to(DTYPES[wanted]))

    def cost_of(pair: Pair, producer: Choice, consumer: Choice) -> CastCost:
        given, wanted = producer.output, consumer.input.format
        if given == wanted:
            return CastCost(0.0, 0.0)
        reader = shapes[pair[1]]
        last_only = reader.site.component is Component.LM_HEAD and not model.every_row
        rows = (batch, batch if last_only else batch * prompt)
        width = reader.k or reader.elements
        return CastCost(*(cast_s(n, width, given, wanted) for n in rows))

    return Casts(neighbors(model), cost_of)


def _both(
    model: ModelShape, shape: SiteShape, choice: Choice, workload: Workload
) -> tuple[float, float]:
    batch, prompt = workload.batch_size, workload.prompt_tokens
    mean_context = prompt + workload.output_tokens // 2
    decode = _op(model, shape, choice, batch, 1, mean_context)
    last_only = shape.site.component is Component.LM_HEAD and not model.every_row
    prefill = _op(model, shape, choice, batch, 1 if last_only else prompt, prompt)
    return seconds(decode), seconds(prefill)


def _op(
    model: ModelShape,
    shape: SiteShape,
    choice: Choice,
    batch: int,
    queries: int,
    context: int,
) -> Op:
    component = shape.site.component
    dtype = DTYPES[choice.input.format]
    if component in LINEAR:
        return _linear(shape, choice, batch * queries, dtype)
    if component is Component.EMBEDDINGS:
        return _embedding(model, choice, batch * queries, dtype)
    if component is Component.KV_CACHE:
        return _cache(shape, dtype, batch * queries)
    if shape.heads:
        return _attention(
            shape, dtype, batch, queries, min(context, shape.window or context)
        )
    x = torch.zeros(batch * queries, max(shape.elements, 1), dtype=dtype)
    if component is Component.NORMS:
        x = x.view(-1, model.hidden)
        return lambda: functional.rms_norm(x, (model.hidden,))
    return lambda: functional.silu(x)


def _linear(shape: SiteShape, choice: Choice, rows: int, dtype: torch.dtype) -> Op:
    if choice.weight_only:  # no FP8 unit here: widened at every use
        codes = torch.zeros(shape.n, shape.k, dtype=torch.uint8)
        x16 = torch.zeros(rows, shape.k, dtype=torch.bfloat16)
        return lambda: functional.linear(x16, widened(codes))
    x = torch.zeros(rows, shape.k, dtype=dtype)
    weight = torch.zeros(shape.n, shape.k, dtype=dtype)
    return lambda: functional.linear(x, weight)


def _embedding(model: ModelShape, choice: Choice, rows: int, dtype: torch.dtype) -> Op:
    ids = torch.zeros(rows, dtype=torch.long)
    if choice.is_fp8:
        codes = to_codes(torch.zeros(model.vocab, model.hidden), E4M3)
        return lambda: widened(codes[ids])
    table = torch.zeros(model.vocab, model.hidden, dtype=dtype)
    return lambda: functional.embedding(ids, table)


def _cache(shape: SiteShape, dtype: torch.dtype, rows: int) -> Op:
    """Write K and V of new tokens. The matmuls, timed themselves, read the cache."""
    new = torch.zeros(2, rows, shape.kv_heads, shape.head_dim, dtype=dtype)
    held = torch.zeros_like(new)
    return lambda: held.copy_(new)


def _attention(
    shape: SiteShape, dtype: torch.dtype, batch: int, queries: int, context: int
) -> Op:
    q = torch.zeros(batch, shape.heads, queries, shape.head_dim, dtype=dtype)
    kv = torch.zeros(batch, shape.heads, context, shape.head_dim, dtype=dtype)
    p = torch.zeros(batch, shape.heads, queries, context, dtype=dtype)
    match shape.site.component:
        case Component.ATTN_SCORES:
            return lambda: q @ kv.transpose(2, 3)
        case Component.ATTN_SOFTMAX:
            return lambda: p.softmax(dim=-1)
        case _:
            return lambda: p @ kv
