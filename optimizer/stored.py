"""Which stored tensors make up each parameter of a network.

transformers renames some tensors while it loads, and puts the matrices of experts
together. Here the same is said the other way round, so that one parameter can be read
without the others.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from optimizer.checkpoint import forced_apart
from optimizer.construct import refuse_keys, tied
from optimizer.shards import Shards

# (in the network, in files), by model type; "" is for all.
RENAMED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "": (
        (".LayerNorm.weight", ".LayerNorm.gamma"),
        (".LayerNorm.bias", ".LayerNorm.beta"),
    ),
    "gpt_neox": (("lm_head.", "embed_out."),),
    "mixtral": ((".mlp.", ".block_sparse_moe."),),
}
# Experts are one parameter (expert, out, in) in the network, and in files a matrix
# each: by the end of the parameter, what is put on top of each other, in two spellings.
EXPERTS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    ".experts.gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    ".experts.down_proj": (("down_proj",), ("w2",)),
}


@dataclass(frozen=True, slots=True)
class Source:
    """Stored tensors that make up a parameter: one, or for experts several of each."""

    names: tuple[tuple[str, ...], ...]  # the inner ones are put on top of each other
    stacked: bool = False  # in a dimension of their own, in front


def read(shards: Shards, source: Source) -> Tensor:
    """Return a parameter, float32. Raises NonFiniteError naming the stored tensor."""
    each = [_one(shards, names) for names in source.names]
    return torch.stack(each) if source.stacked else each[0]


def _one(shards: Shards, names: tuple[str, ...]) -> Tensor:
    parts = [shards.get(name) for name in names]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def sources(network: nn.Module, shards: Shards) -> dict[str, Source]:
    """Return where each parameter is stored, tied ones under each of their names.

    Raises ModelError naming what is missing, has another shape or is left over.
    """
    stored = frozenset(shards.names())
    parameters = dict(network.named_parameters(remove_duplicate=False))
    found: dict[str, Source] = {}
    for name in parameters:
        for spelled in _spellings(name, network, shards.checkpoint.model_type):
            source = _stored_as(spelled, stored)
            if source is not None:
                found[name] = source
                break
    left = _left(network, stored, found)
    _tie(network, shards, found)
    missing = [name for name in parameters if name not in found]
    refuse_keys(shards.checkpoint, "missing_keys", missing)
    wrong = [n for n, p in parameters.items() if p.shape != _shape(found[n], shards)]
    refuse_keys(shards.checkpoint, "mismatched_keys", wrong)
    refuse_keys(shards.checkpoint, "unexpected_keys", left)
    return found


def _tie(network: nn.Module, shards: Shards, found: dict[str, Source]) -> None:
    """Give tied parameters one source, whichever of them is stored."""
    for target, source in tied(network).items():
        own, one = found.get(target), found.get(source)
        if own and one and not torch.equal(read(shards, own), read(shards, one)):
            raise forced_apart(target, source)
        if shared := one or own:
            found[target] = found[source] = shared


def _spellings(name: str, network: nn.Module, model_type: str) -> Iterator[str]:
    """Yield the names that a parameter may have in files, the network's own first."""
    prefix = f"{getattr(network, 'base_model_prefix', '')}."
    names = [name]
    for here, there in (*RENAMED[""], *RENAMED.get(model_type, ())):
        names += [n.replace(here, there) for n in names if here in n]
    for spelled in names:
        yield spelled
        yield spelled.removeprefix(prefix)
        yield prefix + spelled


def _stored_as(name: str, stored: frozenset[str]) -> Source | None:
    """Return the tensors that make up what is called `name`. None: none is there."""
    if name in stored:
        return Source(((name,),))
    for end, spellings in EXPERTS.items():
        base = name.removesuffix(end)
        for parts in spellings if name.endswith(end) else ():
            experts = tuple(_experts(base, parts, stored))
            if experts:
                return Source(experts, stacked=True)
    return None


def _experts(
    base: str, parts: tuple[str, ...], stored: frozenset[str]
) -> Iterator[tuple[str, ...]]:
    """Yield the matrices of one expert after the other, until one is not there."""
    expert = 0
    while True:
        names = tuple(f"{base}.experts.{expert}.{part}.weight" for part in parts)
        if not stored.issuperset(names):
            return
        yield names
        expert += 1


def _shape(source: Source, shards: Shards) -> torch.Size:
    shapes = [shards.checkpoint.tensors[name].shape for name in source.names[0]]
    one = shapes[0]
    if len(shapes) > 1:
        one = (sum(shape[0] for shape in shapes), *one[1:])
    return torch.Size((len(source.names), *one) if source.stacked else one)


def _left(
    network: Any, stored: frozenset[str], found: Mapping[str, Source]
) -> list[str]:
    """Return the stored tensors that nothing in the network takes."""
    used = {n for source in found.values() for names in source.names for n in names}
    ignored = (
        *(network._keys_to_ignore_on_load_unexpected or ()),
        r"rotary_emb\.inv_freq$",
    )
    return sorted(
        name
        for name in stored - used
        if not any(re.search(pattern, name) for pattern in ignored)
    )
