"""The physical limit: how fast a stack could be if a device reached its data sheet.

Whichever runs out first over a whole pass: the bytes that must come from memory, or the
products that must be made. Nothing else takes time, every matrix is read once for all
rows, inputs and outputs never leave the chip. No latency lies below it; a figure that
does is wrong, or the data sheet is.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from optimizer.cost import share, steps
from optimizer.hardware import Device
from optimizer.ledger import Kinds
from optimizer.roofline import Step, cache_row_bytes, stored
from optimizer.sizes import size_bytes
from optimizer.spec import Workload
from optimizer.stack import Choice, Component, SiteShape


class Term(StrEnum):
    """What sets a limit."""

    BANDWIDTH = "memory bandwidth"
    COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Limit:
    """The least seconds of one pass, and what sets them; on one of several devices."""

    seconds: float
    term: Term
    weight_bytes: int  # that the pass reads
    cache_bytes: int
    flops: int

    def said(self, device: Device) -> str:
        """Return the term with its figures."""
        if self.term is Term.COMPUTE:
            return f"{self.flops / 1e12:.3g} TFLOP at the dense peak of {device.name}"
        return (
            f"{self.weight_bytes / 1e9:.3g} GB of weights and "
            f"{self.cache_bytes / 1e9:.3g} GB of KV cache at "
            f"{device.bandwidth_bytes_s / 1e9:.0f} GB/s"
        )


def limits(alike: Kinds, device: Device, workload: Workload) -> tuple[Limit, Limit]:
    """Return the limits of one decode step and of the prefill of a stack's `kinds`.

    Raises KeyError where the device has no rate for what a choice multiplies.
    """
    shared = [
        (share(shape, workload.tensor_parallel), choice, count)
        for (shape, choice), count in alike.items()
    ]
    prefill, decode = steps(workload)
    found = {shape.site.component for shape, _ in alike}
    uncached = Component.ATTN_SCORES in found and Component.KV_CACHE not in found
    prefill = replace(prefill, every_row=uncached)
    return _limit(shared, device, decode), _limit(shared, device, [prefill])


def _limit(
    shared: Iterable[tuple[SiteShape, Choice, int]],
    device: Device,
    passes: Sequence[Step],
) -> Limit:
    """Return the limit of the mean pass: the context grows as tokens are made."""
    weights = cache = flops = compute_s = 0.0
    for shape, choice, count in shared:
        weights += count * _read_bytes(shape, choice, passes[0])
        cache += count * _mean(_cached_bytes(shape, choice, one) for one in passes)
        products = count * _mean(_flops(shape, one) for one in passes)
        if products:
            flops += products
            compute_s += products / device.peak(choice.input.format)
    bandwidth_s = (weights + cache) / device.bandwidth_bytes_s
    return Limit(
        seconds=max(bandwidth_s, compute_s),
        term=Term.BANDWIDTH if bandwidth_s >= compute_s else Term.COMPUTE,
        weight_bytes=math.floor(weights),
        cache_bytes=math.floor(cache),
        flops=math.floor(flops),
    )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _is_matrix(shape: SiteShape) -> bool:
    """Whether all of it is read: of the table of tokens, a row for each is."""
    return shape.k > 0 and shape.site.component is not Component.EMBEDDINGS


def _read_bytes(shape: SiteShape, choice: Choice, one: Step) -> float:
    """Bytes of weights; of experts, those that some row needs if routers are even."""
    if not _is_matrix(shape):
        return 0.0
    idle = (1 - shape.active_share) ** one.rows(shape.site.component)
    return shape.weight_elements * (1 - idle) * size_bytes(stored(choice).format)


def _cached_bytes(shape: SiteShape, choice: Choice, one: Step) -> float:
    if shape.site.component is not Component.KV_CACHE or one.queries > 1:
        return 0.0  # a prompt attends to what was just made
    return one.sequences * one.keys(shape.window) * cache_row_bytes(shape, choice)


def _flops(shape: SiteShape, one: Step) -> float:
    if _is_matrix(shape):
        return 2.0 * one.rows(shape.site.component) * shape.n * shape.k
    if shape.site.component in (Component.ATTN_SCORES, Component.ATTN_VALUES):
        width = shape.heads * shape.head_dim
        return 2.0 * one.sequences * one.pairs(shape.window) * width
    return 0.0
