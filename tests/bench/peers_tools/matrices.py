"""Every matrix as a site of its own, so that any assignment runs exactly as given.

The product decides q, k, v together, as engines fuse them; not every peer does.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor

from optimizer.model import LoadedModel
from optimizer.quiet import stdout_without
from optimizer.sites import LinearPart
from optimizer.stack import (
    LINEAR,
    WHOLE_MODEL,
    Choice,
    Site,
    Stack,
    choice_named,
)

WIDE_BITS, NARROW_BITS = 16, 8
APART = 1000  # the layer number of a matrix's own site: layer + APART × its place


def split(model: LoadedModel) -> dict[str, Site]:
    """Make every matrix of every layer its own site; return the sites by name.

    In place: the model's own sites of these matrices are gone.
    """
    sites: dict[str, Site] = {}
    parts: dict[Site, list[LinearPart]] = {}
    for site, some in model.parts.items():
        for place, part in enumerate(some):
            if site.layer != WHOLE_MODEL:
                own = Site(site.layer + APART * place, site.component)
                part = replace(part, site=own)
                part.module.forward = _forward(model, part)
                sites[part.name] = own
            parts.setdefault(part.site, []).append(part)
    model.parts = parts
    return sites


def _forward(model: LoadedModel, part: LinearPart) -> Callable[[Tensor], Tensor]:
    # A view: the gradient of this site's input is what this matrix alone sends back.
    return lambda x: model.executor.linear(part, x.view_as(x))


def group(site: Site) -> Site:
    """Return the site that an engine runs this matrix in."""
    return Site(site.layer % APART, site.component)


def assign(
    sites: Mapping[str, Site],
    narrow: Mapping[Site, Choice] | Collection[str],
    wide: str,
) -> Stack:
    """Return the stack with these choices, `wide` everywhere else.

    Names without choices get per-tensor static e4m3 for weights and inputs.
    """
    choices = {s: choice_named(s.component, wide) for s in sites.values()}
    if isinstance(narrow, Mapping):
        choices |= narrow
    else:
        for name in narrow:
            site = sites[name]
            choices[site] = choice_named(site.component, "fp8_e4m3")
    return Stack(choices)


def mean_bits(sizes: Mapping[str, int], narrow: Collection[str]) -> float:
    """Return the bits of a weight, over all matrices."""
    eight = sum(sizes[name] for name in narrow)
    return WIDE_BITS - (WIDE_BITS - NARROW_BITS) * eight / sum(sizes.values())


def least(
    gains: Mapping[str, float],
    sizes: Mapping[str, int],
    bits: float,
    groups: Mapping[str, object],
) -> list[str]:
    """Return the names to narrow so that `bits` are met and the least is lost.

    `gains` is what is lost by narrowing; names of one group go together. Exact.
    """
    keys = list(dict.fromkeys(groups[name] for name in sizes))
    loss = np.array([sum(gains[n] for n in sizes if groups[n] == k) for k in keys])
    size = np.array([sum(sizes[n] for n in sizes if groups[n] == k) for k in keys])
    saved = (WIDE_BITS - bits) / (WIDE_BITS - NARROW_BITS) * size.sum()
    with stdout_without(b"Highs"):
        found = milp(
            loss / max(loss.max(), 1e-30),
            constraints=LinearConstraint(size / size.sum(), lb=saved / size.sum()),
            integrality=np.ones(len(keys)),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 1e-4, "time_limit": 10.0},
        )
    assert found.x is not None, found.message
    taken = {k for k, x in zip(keys, found.x, strict=True) if x > 0.5}
    return [name for name in sizes if groups[name] in taken]


def ends_last(sizes: Mapping[str, int], layers: int, bits: float) -> list[str]:
    """Narrow the middle layers first, the first and the last at the end."""
    middle = (layers - 1) / 2
    names = sorted(sizes, key=lambda name: abs(_layer(name) - middle))
    return until(names, sizes, bits)


def _layer(name: str) -> int:
    return next(int(word) for word in name.split(".") if word.isdigit())


def until(names: Iterable[str], sizes: Mapping[str, int], bits: float) -> list[str]:
    """Narrow in this order until at most `bits` are left."""
    taken: list[str] = []
    for name in names:
        if mean_bits(sizes, taken) <= bits:
            break
        taken.append(name)
    return taken


def at_random(sizes: Mapping[str, int], bits: float, seed: int) -> list[str]:
    """Narrow in a random order."""
    names: Sequence[str] = list(sizes)
    order = np.random.default_rng(seed).permutation(len(names))
    return until([names[i] for i in order], sizes, bits)


def linear_sites(model: LoadedModel) -> dict[str, int]:
    """Return the elements of every matrix that bits are counted over: no lm_head."""
    return {
        part.name: part.weight.numel()
        for site, some in model.parts.items()
        if site.component in LINEAR and site.layer != WHOLE_MODEL
        for part in some
    }
