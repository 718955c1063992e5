"""One pass over data: the largest magnitude at every place that may get a scale.

A `Stats` has a fixed size however much data passes, and two of them merge. Tokens
that are padding are never seen.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optimizer.batches import batches, graph_tokens, together
from optimizer.errors import NonFiniteError
from optimizer.execute import Operand, Reference
from optimizer.model import LoadedModel
from optimizer.sites import LinearPart
from optimizer.stack import Component, Role, Site
from optimizer.walk import Activations, Told, silent, walk
from optimizer.watch import Statistics

INSIDE_ATTENTION = frozenset(
    {
        Component.KV_CACHE,
        Component.ATTN_SCORES,
        Component.ATTN_SOFTMAX,
        Component.ATTN_VALUES,
    }
)


@dataclass(frozen=True, slots=True)
class Stats:
    """What calibration keeps of one place."""

    amax: Tensor  # fp32, () or (heads,) for attention operands
    count: int  # elements seen

    def merge(self, other: "Stats") -> "Stats":
        """Return the stats of both streams together, in either order."""
        largest = torch.maximum(self.amax, other.amax)
        return Stats(largest, self.count + other.count)


def observe(x: Tensor, keep: Tensor | None, largest_over: tuple[int, ...]) -> Stats:
    """Return the stats of `x`; its amax is taken over the dimensions `largest_over`.

    `keep` is a mask that broadcasts to `x`: what is False there is padding, not seen.
    """
    x = x.detach()
    count = x.numel()
    if keep is not None:
        x = x.masked_fill(~keep, 0.0)
        count = int(keep.expand_as(x).sum())
    # Two reductions read x twice and still beat one of x.abs(), which is a copy.
    largest = torch.maximum(x.amax(dim=largest_over), -x.amin(dim=largest_over))
    return Stats(largest.float(), count)


class Observer(Reference):
    """Runs the reference and keeps running extremes."""

    def __init__(self, statistics: Statistics | None = None) -> None:
        self.stats: dict[tuple[Site, Role], Stats] = {}
        self.statistics = statistics  # who sets the extremes; None: not asked for
        self.tokens: Tensor | None = None  # (batch, tokens): False is padding
        self.samples: Sequence[int] = ()  # that run together: named in errors
        self._seen: dict[tuple[Site, Role], Tensor] = {}

    def tap(
        self, site: Site, role: Role, x: Tensor, mask: Tensor | None = None
    ) -> Operand:
        """Add the tensor to the running stats."""
        key = (site, role)
        if self._seen.get(key) is x:  # a sibling of the fused group has shown it
            return x, None
        self._seen[key] = x
        visible = x if mask is None else x.masked_fill(mask < 0, 0.0)
        stats = observe(visible, self._keep(site, x), _largest_over(site, x))
        if not bool(stats.amax.isfinite().all()):
            raise NonFiniteError(f"{site} {role}, {self._culprit(visible)}")
        before = self.stats.get(key)
        self.stats[key] = stats if before is None else before.merge(stats)
        if self.statistics is not None:
            self.statistics.see(site, role, visible, self.tokens)
        return x, None

    def linear(self, part: LinearPart, x: Tensor) -> Tensor:
        """Run in fp32; of the head see the input alone, since nothing follows it."""
        if part.site.component is Component.LM_HEAD:
            self.tap(part.site, Role.INPUT, x)
            return x.new_zeros(1).expand(*x.shape[:-1], len(part.weight))
        return super().linear(part, x)

    def _culprit(self, x: Tensor) -> str:
        """Name the first sample of those that run together that is not finite."""
        of_each = x.chunk(len(self.samples)) if self.samples else ()
        bad = (
            n
            for n, t in zip(self.samples, of_each, strict=True)
            if not t.isfinite().all()
        )
        return f"sample {next(bad)}" if self.samples else "the sample"

    def _keep(self, site: Site, x: Tensor) -> Tensor | None:
        if self.tokens is None:
            return None
        if x.ndim == 2:  # rows that an expert got: padding goes to none
            return None
        batch, tokens = self.tokens.shape
        if site.component in INSIDE_ATTENTION:  # (batch, heads, tokens, ...)
            return self.tokens.view(batch, 1, tokens, 1)
        return self.tokens.view(batch, tokens, *[1] * (x.ndim - 2))

    def forget(self) -> None:
        """Let go of the tensors of the last sample."""
        self._seen.clear()


def _largest_over(site: Site, x: Tensor) -> tuple[int, ...]:
    """Every dimension, but the heads of what may get a scale for each head."""
    if site.component in INSIDE_ATTENTION - {Component.ATTN_SOFTMAX}:
        return (0, 2, 3)
    return tuple(range(x.ndim))


def calibrate(
    model: LoadedModel,
    sequences: Iterable[Tensor],
    progress: Told = silent,
    masks: Iterable[Tensor] | None = None,
    kept: Activations | None = None,
    numbers: Sequence[int] | None = None,
    statistics: Statistics | None = None,
) -> dict[tuple[Site, Role], Stats]:
    """Run the reference over `sequences` of ids (batch, tokens) and return the stats.

    Neighbors of equal length run together, as in a sweep.

    `masks` are attention masks, one per sequence, 0 where a token is padding. `kept`
    gets the inputs of every stage, for a sweep of the same sequences; `numbers` are
    theirs, where these are not all. `statistics` learns who sets the extremes.
    Raises NonFiniteError naming the site and the sample.
    """
    observer = Observer(statistics)
    every = list(sequences)
    every_mask = None if masks is None else list(masks)
    names = list(range(len(every)) if numbers is None else numbers)

    alone = every_mask is not None  # a mask goes with its own ids
    groups = batches(every, 1 if alone else graph_tokens(model))
    ids = {names[group[0]]: together(every, group) for group in groups}
    samples = {names[group[0]]: [names[n] for n in group] for group in groups}

    def before(index: int) -> Tensor | None:
        observer.forget()
        mask = None if every_mask is None else every_mask[names.index(index)]
        observer.tokens = None if mask is None else mask.bool()
        observer.samples = samples[index]
        if statistics is not None:
            statistics.ids = ids[index]
        return mask

    walk(
        model,
        list(ids.values()),
        observer,
        kept=Activations() if kept is None else kept,
        before=before,
        keep_all=kept is not None,
        names=list(ids),
        progress=progress,
    )
    observer.forget()
    return observer.stats


def stats_to_json(stats: dict[tuple[Site, Role], Stats]) -> dict[str, Any]:
    """Return plain JSON; floats survive it exactly."""
    return {
        f"{site} {role}": [s.amax.tolist(), s.count]
        for (site, role), s in stats.items()
    }


def stats_from_json(
    results: Iterable[Mapping[str, Any]],
) -> dict[tuple[Site, Role], Stats]:
    """Return the stats of several parts of the data together."""
    merged: dict[tuple[Site, Role], Stats] = {}
    for result in results:
        for name, (largest, count) in result.items():
            site, role = name.split(" ")
            key = (Site.parse(site), Role(role))
            stats = Stats(torch.tensor(largest), count)
            merged[key] = merged[key].merge(stats) if key in merged else stats
    return merged


def amaxes(stats: dict[tuple[Site, Role], Stats]) -> dict[tuple[Site, Role], Tensor]:
    """Return what static scales are made from."""
    return {key: s.amax for key, s in stats.items()}
