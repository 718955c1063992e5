"""Seconds of a site in one step: of kernels that were measured, else of the roofline.

Where the tables have the very shape and format, they are the answer. What they lack is
the roofline's, corrected by the nearest kernel that they have: the same format at the
edge of the grid (a vocabulary of 152,064 by the ratio of measured to modelled at
65,536), or the nearest format at the same shape (FP8 weights under 16-bit inputs by the
ratio of bf16). So a choice does not look faster because nobody measured it.

No figure is under the physical limit, `roofline.least_s`.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from types import MappingProxyType

from optimizer import roofline
from optimizer.fits import Fit, fit
from optimizer.formats import FORMATS
from optimizer.hardware import Device
from optimizer.kernels import Basis, Tables, Timing
from optimizer.roofline import Frame, Step
from optimizer.stack import (
    LINEAR,
    Choice,
    Component,
    Granularity,
    Precision,
    Site,
    SiteShape,
    choice_named,
)

ATTENTION = (Component.KV_CACHE, Component.ATTN_SCORES, Component.ATTN_VALUES)

# The choices of a linear site whose kernels the tables may have. fp16 has bf16's rate
# and bytes; a static scale is FP8 without the search for one.
_TABLED = MappingProxyType(
    {
        "bf16": "bf16",
        "fp16": "bf16",
        "fp8_e4m3": "fp8",
        "fp8_e4m3_token": "fp8",
        "fp8_e4m3_block": "fp8_block",
        "fp4_e2m1_nv": "nvfp4",
        "int8": "int8",
    }
)
_STATIC = "fp8_e4m3"
# Of what is not measured: the choice whose kernel is nearest. Else bf16's.
_NEAREST = MappingProxyType(
    {
        "fp8_e5m2": "fp8_e4m3",
        "fp8_e4m3_block": "fp8_e4m3_token",
        "fp6_e3m2_mx": "fp8_e4m3_token",
        "fp4_e2m1_mx": "fp4_e2m1_nv",
        "int8": "fp8_e4m3_token",
    }
)
# What the tables call a cache. e5m2 was not measured: it has e4m3's bytes.
_CACHES = MappingProxyType(
    {"bf16": "bf16", "fp16": "bf16", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}
)
_AS_BF16 = ("bf16", "fp16")
EDGE_POINTS = 3  # whose median stands for what is beyond: single ones are off by 20 %
# Of narrow weights under 16-bit inputs: the median of what this gives for FP8 on an A100
# against TensorRT-LLM 1.0's int8 weights there, the same bytes (3,549 shapes; most of it
# below, for small matrices and for 18 to 128 rows; `python -m tests.bench.latency`).
WEIGHT_ONLY_ERROR = 0.20
_PASSES = (Granularity.TENSOR, Granularity.TOKEN)  # to FP8: static, and dynamic


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds, where from, and the relative error to expect."""

    seconds: float
    basis: Basis
    error: float


@lru_cache(maxsize=1 << 13)
def timed(
    shape: SiteShape,
    choice: Choice,
    device: Device,
    step: Step,
    within: Frame,
    tables: Tables | None,
) -> Timed:
    """Return the seconds of a site in a step.

    Raises HardwareError as `roofline.seconds` does.
    """
    case = _Case(shape, choice, device, step, within, tables)
    if shape.site.component in ATTENTION:
        found = _attention(case)
    elif shape.site.component in LINEAR or shape.site.component is Component.ROUTER:
        found = _linear(case)
    else:
        found = Timed(case.modelled_s(), Basis.ROOFLINE, case.reached.stream.error)
    least = roofline.least_s(shape, choice, device, step)
    return replace(found, seconds=max(found.seconds, least))


def pass_s(
    rows: int, columns: int, precision: Precision, device: Device, tables: Tables | None
) -> float:
    """Return the seconds of the pass to `precision` that is in a site's own; 0: none."""
    scaled = FORMATS[precision.format].scaled
    if tables is not None and scaled and precision.granularity in _PASSES:
        dynamic = precision.granularity is Granularity.TOKEN
        found = tables.quantize(rows, columns, dynamic=dynamic)
        if found is not None:
            return found.seconds
    return roofline.quantize_s(rows * columns, precision, device, fit(device))


@dataclass(frozen=True, slots=True)
class _Case:
    """A site, a choice and a step."""

    shape: SiteShape
    choice: Choice
    device: Device
    step: Step
    within: Frame
    tables: Tables | None

    def modelled_s(self) -> float:
        """The roofline, uncorrected."""
        return roofline.seconds(
            self.shape,
            self.choice,
            self.device,
            self.step,
            self.within,
            self.reached,
        )

    @property
    def reached(self) -> Fit:
        """What kernels reach of the device, by its own rows where there are some."""
        own = fit(self.device)
        return own if self.tables is None else self.tables.corrected(own)

    def named(self, name: str) -> "_Case":
        """Return the case with another choice."""
        choice = choice_named(self.shape.site.component, name)
        return self if choice is self.choice else replace(self, choice=choice)


# Matrices


def _linear(case: _Case) -> Timed:
    measured = _measured_gemm(case)
    if measured is not None and case.tables is not None:
        return Timed(measured.seconds, case.tables.basis, measured.error)
    error = case.reached.gemm(roofline.gemm_format(case.choice)).error
    if case.choice.weight_only:
        error = WEIGHT_ONLY_ERROR
    seconds = case.modelled_s() * _gemm_ratio(case)
    return Timed(seconds, Basis.ROOFLINE, error)


def _measured_gemm(case: _Case) -> Timing | None:
    fmt = _TABLED.get(case.choice.name)
    routed = case.shape.active_share != 1.0  # experts: another kernel
    if case.tables is None or fmt is None or routed:
        return None
    rows = case.step.rows(case.shape.site.component)
    found = case.tables.gemm(fmt, rows, case.shape.n, case.shape.k)
    if found is None or case.choice.name != _STATIC:
        return found
    known, sought = (
        case.tables.quantize(rows, case.shape.k, dynamic=d) for d in (False, True)
    )
    if known is None or sought is None:
        return None
    seconds = found.seconds - sought.seconds + known.seconds
    return replace(found, seconds=seconds)


def _gemm_ratio(case: _Case) -> float:
    """Return measured over modelled seconds of the nearest kernels; 1: none is near."""
    for name in _nearest(case.choice.name):
        found = [
            measured.seconds / near.named(name).modelled_s()
            for near in _inside(case)
            if (measured := _measured_gemm(near.named(name))) is not None
        ]
        if found:
            return statistics.median(found)
    return 1.0


def _nearest(name: str) -> Iterator[str]:
    yield name
    while name in _NEAREST:
        name = _NEAREST[name]
        yield name
    if name != "bf16":
        yield "bf16"


def _inside(case: _Case) -> Iterator[_Case]:
    """Yield the case where it is in the grid of bf16, else the cases nearest to it."""
    grid = case.tables.gemms.get("bf16") if case.tables else None
    if grid is None or case.shape.active_share != 1.0:
        return
    rows = case.step.rows(case.shape.site.component)
    sizes = zip((rows, case.shape.n, case.shape.k), grid.axes, strict=True)
    for m, n, k in product(*(_within(size, axis) for size, axis in sizes)):
        shape = replace(case.shape, n=n, k=k, weight_elements=n * k)
        yield replace(case, shape=shape, step=Step(m, 1, 1))


def _within(size: int, axis: Sequence[int]) -> Sequence[int]:
    """Return the size; the last points of the axis where it is beyond them."""
    if size > axis[-1]:
        return axis[-EDGE_POINTS:]
    return (max(size, axis[0]),)


# Attention


def _attention(case: _Case) -> Timed:
    """The kernel's time, shared out among its sites as the roofline shares it.

    The cache's format decides the kernel; products in FP8 were not measured.
    """
    shape = case.shape
    sizes = (shape.heads, shape.kv_heads, shape.head_dim, shape.window)
    wide, ratio = _wide(sizes, case.device, case.step, case.within, case.tables)
    if case.shape.site.component is Component.KV_CACHE:
        return _cache(case, ratio)
    seconds = ratio * case.modelled_s()
    if wide is None or case.choice.name not in _AS_BF16:
        return Timed(seconds, Basis.ROOFLINE, _attention_error(case))
    return replace(wide, seconds=seconds)


@lru_cache(maxsize=1 << 12)  # three sites, whatever they choose, are one kernel
def _wide(
    sizes: tuple[int, int, int, int | None],
    device: Device,
    step: Step,
    within: Frame,
    tables: Tables | None,
) -> tuple[Timed | None, float]:
    """Return the kernel's time in 16 bits, and how far from the model it is; None: 1."""
    heads, kv_heads, head_dim, window = sizes
    site = Site(0, Component.KV_CACHE)
    shape = SiteShape(
        site, heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window
    )
    choice = choice_named(Component.KV_CACHE, "bf16")
    case = _Case(shape, choice, device, step, within, tables)
    found = _kernel(case, "bf16", "bf16")
    return found, found.seconds / _kernel_s(case, "bf16") if found else 1.0


def _cache(case: _Case, ratio: float) -> Timed:
    """Reading K and V: what the kernel takes beside its products; and writing them."""
    name = case.choice.output
    written = roofline.written_s(
        case.shape, case.choice, case.device, case.step, case.within, case.reached
    )
    whole = _kernel(case, _CACHES.get(name, ""), case.choice.name)
    if whole is None:
        read = ratio * (case.modelled_s() - written)
        return Timed(read + written, Basis.ROOFLINE, _attention_error(case))
    read = max(whole.seconds - ratio * _products_s(case), 0.0)
    basis = whole.basis if name != "fp8_e5m2" else Basis.ROOFLINE
    return Timed(read + written, basis, whole.error)


def _kernel(case: _Case, fmt: str, cache: str) -> Timed | None:
    """Return the time of the kernel for a cache, or that of a smaller one, scaled.

    `fmt` is what the tables call the choice `cache`. None: they have none of it.
    """
    for near in _smaller(case):
        found = _measured_attention(near, fmt)
        if found is None or case.tables is None:
            continue
        if near is case:
            return Timed(found.seconds, case.tables.basis, found.error)
        grown = _kernel_s(case, cache) / _kernel_s(near, cache)
        return Timed(found.seconds * grown, Basis.ROOFLINE, _attention_error(case))
    return None


def _smaller(case: _Case) -> Iterator[_Case]:
    """Yield the case, then with fewer and fewer sequences, then tokens."""
    step = case.step
    yield case
    while step.sequences > 1:
        step = replace(step, sequences=step.sequences // 2)
        yield replace(case, step=step)
    while step.context > 1:
        queries = max(step.queries // 2, 1)
        step = Step(1, queries, step.context / 2 if queries == 1 else queries)
        yield replace(case, step=step)


def _attention_error(case: _Case) -> float:
    reached = case.reached
    return (reached.generation if case.step.queries == 1 else reached.context).error


def _kernel_s(case: _Case, cache: str) -> float:
    """The modelled seconds of the whole kernel, its products in 16 bits."""
    part = _part(case, Component.KV_CACHE).named(cache)
    written = roofline.written_s(
        part.shape, part.choice, part.device, part.step, part.within, part.reached
    )
    return _products_s(case) + part.modelled_s() - written


def _products_s(case: _Case) -> float:
    ends = (Component.ATTN_SCORES, Component.ATTN_VALUES)
    return sum(_part(case, c).named("bf16").modelled_s() for c in ends)


def _part(case: _Case, component: Component) -> _Case:
    if case.shape.site.component is component:
        return case
    site = Site(case.shape.site.layer, component)
    return replace(case, shape=replace(case.shape, site=site))


def _measured_attention(case: _Case, fmt: str) -> Timing | None:
    shape, step, tables = case.shape, case.step, case.tables
    if tables is None:
        return None
    sizes = (shape.heads, shape.kv_heads, shape.head_dim, shape.window)
    if step.queries == 1:
        context = round(step.context)
        return tables.generation_attention(fmt, step.sequences, context, *sizes)
    return tables.context_attention(fmt, step.sequences, step.queries, *sizes)
