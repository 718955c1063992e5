"""Where a network's sites are: its matrices, norms and activations, and their sizes.

Names are read from the module tree. What carries weights and is not recognized is
listed with a reason; nothing is dropped silently.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from optimizer.errors import ModelError
from optimizer.stack import (
    WHOLE_MODEL,
    Component,
    ModelShape,
    Site,
    SiteShape,
)

# Where a decoder layer keeps its matrices, by the names that transformers gives them.
LINEAR_PARTS = {
    "self_attn.q_proj": Component.ATTN_QKV,
    "self_attn.k_proj": Component.ATTN_QKV,
    "self_attn.v_proj": Component.ATTN_QKV,
    "self_attn.qkv_proj": Component.ATTN_QKV,  # Phi-3: fused
    "self_attn.o_proj": Component.ATTN_OUT,
    "mlp.gate_proj": Component.FFN_IN,
    "mlp.up_proj": Component.FFN_IN,
    "mlp.gate_up_proj": Component.FFN_IN,  # Phi-3: fused
    "mlp.down_proj": Component.FFN_OUT,
    "attn.c_attn": Component.ATTN_QKV,  # GPT-2: fused, and a Conv1D
    "attn.c_proj": Component.ATTN_OUT,
    "mlp.c_fc": Component.FFN_IN,
    "mlp.c_proj": Component.FFN_OUT,
}
ACTIVATIONS = frozenset({"mlp.act_fn", "mlp.activation_fn", "mlp.act"})
LAYER_LISTS = ("model.layers", "transformer.h")


@dataclass(frozen=True, slots=True, eq=False)
class LinearPart:
    """One matrix of a site: q_proj of attn_qkv, say."""

    site: Site
    name: str  # as named_modules() spells it
    module: nn.Module

    @property
    def weight(self) -> Tensor:
        """The matrix as (out, in), whichever way the module stores it."""
        weight = cast(Tensor, self.module.weight)
        return weight.T if isinstance(self.module, Conv1D) else weight

    @property
    def bias(self) -> Tensor | None:
        """The (out,) bias, or None."""
        bias: Tensor | None = getattr(self.module, "bias", None)
        return bias


@dataclass(frozen=True, slots=True)
class Unrecognized:
    """A module with weights that no site covers."""

    module: str
    reason: str
    parameters: int


def find_layers(network: nn.Module) -> nn.ModuleList:
    """Return the decoder layers. Raises ModelError where no known path has them."""
    for path in LAYER_LISTS:
        try:
            found = network.get_submodule(path)
        except AttributeError:
            continue
        if isinstance(found, nn.ModuleList):
            return found
    raise ModelError(f"no decoder layers at {' or '.join(LAYER_LISTS)}")


def _prefix(network: nn.Module, layers: nn.ModuleList) -> str:
    return next(n for n, m in network.named_modules() if m is layers)


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by a matrix: subclasses count, and GPT-2's Conv1D."""
    return isinstance(module, nn.Linear | Conv1D)


def linear_parts(network: nn.Module, layers: nn.ModuleList) -> Iterator[LinearPart]:
    """Yield every matrix that belongs to a site, layer by layer."""
    prefix = _prefix(network, layers)
    for index, layer in enumerate(layers):
        for path, module in layer.named_modules():
            component = LINEAR_PARTS.get(path)
            if component is not None and is_linear(module):
                site = Site(index, component)
                yield LinearPart(site, f"{prefix}.{index}.{path}", module)
    head = getattr(network, "lm_head", None)
    if isinstance(head, nn.Module) and is_linear(head):
        yield LinearPart(Site(WHOLE_MODEL, Component.LM_HEAD), "lm_head", head)


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalizes: LayerNorm and everybody's RMSNorm."""
    return isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("Norm")


def find_unrecognized(
    network: nn.Module, parts: dict[Site, list[LinearPart]]
) -> Iterator[Unrecognized]:
    """Yield every module with weights of its own that no site covers."""
    known = {id(p.module) for some in parts.values() for p in some}
    for path, module in network.named_modules():
        own = list(module.parameters(recurse=False))
        if not own or id(module) in known or is_norm(module):
            continue
        if isinstance(module, nn.Embedding):
            continue
        count = sum(p.numel() for p in own)
        kind = type(module).__name__
        reason = (
            f"a {kind} at a place that no site of this architecture names"
            if is_linear(module)
            else f"{kind} is not a kind of module that sites are made of"
        )
        yield Unrecognized(path, reason, count)


def coverage_percent(network: nn.Module, unrecognized: Sequence[Unrecognized]) -> float:
    """Return the share of the parameters that some site covers, 0 to 100."""
    total = sum(p.numel() for p in network.parameters())  # tied weights count once
    left = sum(u.parameters for u in unrecognized)
    return 100.0 * (total - left) / total


# --- shapes ------------------------------------------------------------------


def model_shape(
    network: nn.Module,
    architecture: str,
    layers: nn.ModuleList,
    parts: dict[Site, list[LinearPart]],
    stored_bytes: int,
) -> ModelShape:
    """Return the sizes of every site, in order, and of the model."""
    config: Any = network.config
    hidden, vocab = config.hidden_size, config.vocab_size
    embeddings = [m for m in network.modules() if isinstance(m, nn.Embedding)]
    table = sum(m.weight.numel() for m in embeddings)
    # A row of the table, with a scale of its own, is one token: n = vocab, k = hidden.
    sites = [SiteShape(Site(WHOLE_MODEL, Component.EMBEDDINGS), vocab, hidden, table)]
    for index, layer in enumerate(layers):
        sites += _layer_shapes(config, index, layer, parts)
    sites.append(SiteShape(Site(WHOLE_MODEL, Component.NORMS), elements=hidden))
    head = Site(WHOLE_MODEL, Component.LM_HEAD)
    if head in parts:
        sites.append(_linear_shape(head, parts[head]))
    parameters = sum(p.numel() for p in network.parameters())
    tied = head in parts and any(parts[head][0].weight is e.weight for e in embeddings)
    return ModelShape(
        architecture=architecture,
        layers=len(layers),
        hidden=hidden,
        vocab=vocab,
        max_context=getattr(config, "max_position_embeddings", 0),
        parameters=parameters,
        stored_bytes=stored_bytes or 4 * parameters,
        tied_embeddings=tied,
        sites=tuple(sites),
    )


def _linear_shape(site: Site, parts: Sequence[LinearPart]) -> SiteShape:
    rows = tuple(p.weight.shape[0] for p in parts)
    k = parts[0].weight.shape[1]
    return SiteShape(site, sum(rows), k, sum(rows) * k, parts=rows)


def _layer_shapes(
    config: Any, index: int, layer: nn.Module, parts: dict[Site, list[LinearPart]]
) -> list[SiteShape]:
    def linear(component: Component) -> list[SiteShape]:
        site = Site(index, component)
        return [_linear_shape(site, parts[site])] if site in parts else []

    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = attention_module(layer)
    window = getattr(attention, "sliding_window", None)

    def attended(component: Component) -> SiteShape:
        site = Site(index, component)
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        return SiteShape(site, window=window, **sizes)

    norms = sum(1 for m in layer.children() if is_norm(m))
    inner = linear(Component.FFN_OUT)
    act = SiteShape(Site(index, Component.FFN_ACT), elements=inner[0].k if inner else 0)
    norm = SiteShape(Site(index, Component.NORMS), elements=norms * config.hidden_size)
    return [
        *linear(Component.ATTN_QKV),
        attended(Component.ATTN_SCORES),
        attended(Component.ATTN_SOFTMAX),
        attended(Component.ATTN_VALUES),
        *linear(Component.ATTN_OUT),
        *linear(Component.FFN_IN),
        act,
        *linear(Component.FFN_OUT),
        norm,
    ]


def attention_module(layer: nn.Module) -> nn.Module:
    """Return the attention of a layer. Raises ModelError where there is none."""
    for module in layer.modules():
        if type(module).__name__.endswith("Attention"):
            return module
    raise ModelError(f"no attention in {type(layer).__name__}")
