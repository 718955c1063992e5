"""Seconds of the casts between neighbors, as corrections to what their sites cost alone.

A site's own price assumes that its input arrives in its own format, or in 16 bits where
it multiplies FP8: then the pass that narrows it is in the price (`timing.pass_s`).
What a neighbor hands on may differ:

* a matrix that gets another 16- or 32-bit format than it multiplies pays a pass that
  reads the one and writes the other;
* the pass to FP8 reads what it is given: 4 bytes from an fp32 neighbor, not 2;
* where the neighbor already hands on that very format and granularity, there is no
  pass, and its price is given back;
* an elementwise kernel casts in registers: only the bytes that it reads change.

The residual stream is no site: what is added to it is cast in the kernel that adds.
Attention is one kernel, without casts inside. The pass to FP8 is of the kernel tables
where they have it, the rest is the roofline's.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimizer import kernels
from optimizer.cost import HOST_S, share
from optimizer.fits import fit
from optimizer.formats import FORMATS
from optimizer.hardware import Device
from optimizer.kernels import Tables
from optimizer.padding import padded
from optimizer.roofline import moved_s
from optimizer.sizes import size_bytes
from optimizer.spec import Workload
from optimizer.stack import (
    LINEAR,
    WHOLE_MODEL,
    Choice,
    Component,
    ModelShape,
    Precision,
    Site,
    SiteShape,
)
from optimizer.timing import pass_s

NEIGHBORS = (  # within a layer, from the producer to the consumer
    (Component.NORMS, Component.ATTN_QKV),
    (Component.ATTN_VALUES, Component.ATTN_OUT),
    (Component.NORMS, Component.ROUTER),
    (Component.NORMS, Component.FFN_IN),
    (Component.FFN_IN, Component.FFN_ACT),
    (Component.FFN_ACT, Component.FFN_OUT),
)
SIXTEEN_BITS = 2  # bytes: what the pass to FP8 reads in a site's own price


@dataclass(frozen=True, slots=True)
class CastCost:
    """What a pair of neighbors adds to the sum of its sites; negative: a discount."""

    per_token_s: float
    first_token_s: float


Pair = tuple[Site, Site]  # producer, consumer
CastOf = Callable[[Pair, Choice, Choice], CastCost]


@dataclass(frozen=True, slots=True)
class Casts:
    """The neighbors of a model, and what a pair of their choices costs."""

    pairs: tuple[Pair, ...]
    cost_of: CastOf

    def total(self, choices: Mapping[Site, Choice]) -> CastCost:
        """Return the sum over the neighbors that `choices` has, exactly rounded."""
        found = [
            self.cost_of(pair, choices[pair[0]], choices[pair[1]])
            for pair in self.pairs
            if pair[0] in choices and pair[1] in choices
        ]
        return CastCost(
            math.fsum(c.per_token_s for c in found),
            math.fsum(c.first_token_s for c in found),
        )

    def between(
        self, pair: Pair, producers: Sequence[Choice], consumers: Sequence[Choice]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return seconds per token, and to the first one: (producers, consumers) each."""
        costs = [[self.cost_of(pair, p, c) for c in consumers] for p in producers]
        return (
            np.array([[c.per_token_s for c in row] for row in costs]),
            np.array([[c.first_token_s for c in row] for row in costs]),
        )


NO_CASTS = Casts((), lambda pair, producer, consumer: CastCost(0.0, 0.0))


def neighbors(model: ModelShape) -> tuple[Pair, ...]:
    """Return the pairs of sites of which one reads what the other writes.

    They form a forest: no site reads two others.
    """
    return tuple(_neighbors({s.site for s in model.sites}))


def _neighbors(sites: set[Site]) -> Iterator[Pair]:
    for layer in sorted({s.layer for s in sites} - {WHOLE_MODEL}):
        for producer, consumer in NEIGHBORS:
            pair = Site(layer, producer), Site(layer, consumer)
            if sites.issuperset(pair):
                yield pair
    last = Site(WHOLE_MODEL, Component.NORMS), Site(WHOLE_MODEL, Component.LM_HEAD)
    if sites.issuperset(last):
        yield last


def modelled(
    model: ModelShape,
    device: Device,
    workload: Workload,
    *,
    tables: Tables | None = None,
) -> Casts:
    """Return the neighbors of a model and what their casts cost.

    `tables` are those of the device where not given.
    """
    ways = workload.tensor_parallel
    shapes = {s.site: share(s, ways) for s in model.sites}
    whole = {s.site: s for s in model.sites}
    prefill = workload.batch_size * workload.prompt_tokens
    known = tables or kernels.tables(device.id)
    host_s = 0.0 if workload.cuda_graphs else HOST_S

    def cost_of(pair: Pair, producer: Choice, consumer: Choice) -> CastCost:
        given = _handed_on(pair[0], producer, shapes)
        shape = share(padded(whole[pair[1]], consumer), ways)  # as its own price is
        last_only = pair[1].component is Component.LM_HEAD and not model.every_row
        first = workload.batch_size if last_only else prefill
        return CastCost(
            *(
                cast_s(given, consumer.input, shape, rows, device, known, host_s)
                for rows in (workload.batch_size, first)
            )
        )

    return Casts(neighbors(model), cost_of)


def _handed_on(
    site: Site, choice: Choice, shapes: Mapping[Site, SiteShape]
) -> Precision:
    """Return the precision in which a site's output reaches its neighbor."""
    if not FORMATS[choice.output].scaled:
        return Precision(choice.output)
    inner, outer = (
        shapes.get(Site(site.layer, c)) for c in (Component.FFN_IN, Component.FFN_OUT)
    )
    gated = inner is not None and outer is not None and inner.n > outer.k
    if gated:  # it is multiplied by the other half, in 16 bits, before it leaves
        return Precision("bf16")
    return Precision(choice.output, choice.input.granularity)


def cast_s(
    given: Precision,
    wanted: Precision,
    reader: SiteShape,
    tokens: int,
    device: Device,
    tables: Tables | None = None,
    host_s: float = 0.0,
) -> float:
    """Return the seconds to add to what `reader` costs alone, for so many tokens.

    `given` is what arrives, `wanted` what the site computes with; a pass takes `host_s`
    at least.
    """
    width = reader.k or reader.elements
    elements = tokens * width
    read, write = size_bytes(given.format), size_bytes(wanted.format)
    reached = fit(device)
    if FORMATS[wanted.format].scaled:
        if given == wanted:
            return -max(pass_s(tokens, width, wanted, device, tables), host_s)
        return moved_s((read - SIXTEEN_BITS) * elements, device, reached)
    if given.format == wanted.format:
        return 0.0
    if reader.site.component in LINEAR or reader.site.component is Component.ROUTER:
        moved = moved_s((read + write) * elements, device, reached)
        return max(moved + reached.stream.fixed_s, host_s)
    return moved_s((read - write) * elements, device, reached)
