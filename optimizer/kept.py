"""What an architecture keeps in fp32: transformers' classes name the modules."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from optimizer.sites import LinearPart, is_norm
from optimizer.stack import WHOLE_MODEL, Component, Site, SiteShape

NAMED_IN = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


def mark_kept(
    network: nn.Module,
    layers: nn.ModuleList,
    parts: Mapping[Site, list[LinearPart]],
    shapes: tuple[SiteShape, ...],
) -> tuple[SiteShape, ...]:
    """Return the shapes, those of sites that stay in fp32 with the module's name."""
    kept = dict(_kept_sites(network, layers, parts))
    return tuple(replace(s, kept_fp32=kept.get(s.site, "")) for s in shapes)


def _kept_sites(
    network: nn.Module,
    layers: nn.ModuleList,
    parts: Mapping[Site, list[LinearPart]],
) -> Iterator[tuple[Site, str]]:
    """Yield every site with such a module in it, and the name that the class gives."""
    lists: list[Any] = [getattr(network, attribute, None) for attribute in NAMED_IN]
    names = {name for found in lists for name in found or ()}
    site_of = {id(p.module): site for site, some in parts.items() for p in some}
    layer_of = {id(m): i for i, layer in enumerate(layers) for m in layer.modules()}
    for path, module in network.named_modules():
        for name in names.intersection(path.split(".")):
            if id(module) in site_of:
                yield site_of[id(module)], name
            elif isinstance(module, nn.Embedding):
                yield Site(WHOLE_MODEL, Component.EMBEDDINGS), name
            elif is_norm(module):
                layer = layer_of.get(id(module), WHOLE_MODEL)
                yield Site(layer, Component.NORMS), name
