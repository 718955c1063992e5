"""The sizes of a network's sites, as the cost model reads them."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from optimizer.heads import heads_of
from optimizer.kept import mark_kept
from optimizer.sites import LinearPart, attention_module, is_norm
from optimizer.stack import (
    WHOLE_MODEL,
    Component,
    ModelShape,
    Site,
    SiteShape,
)

ENCODERS = frozenset({"bert", "roberta", "distilbert"})


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
        sites.append(_linear_shape(config, head, parts[head]))
    parameters = sum(p.numel() for p in network.parameters())
    tied = head in parts and any(parts[head][0].weight is e.weight for e in embeddings)
    return ModelShape(
        architecture=architecture,
        layers=len(layers),
        hidden=hidden,
        vocab=vocab,
        max_context=max_context(config),
        parameters=parameters,
        stored_bytes=stored_bytes or 4 * parameters,
        tied_embeddings=tied,
        sites=mark_kept(network, layers, parts, tuple(sites)),
    )


def max_context(config: Any) -> int:
    """Return how many tokens the model takes at once; 0 where the config says nothing."""
    mpt = getattr(config, "max_seq_len", 0)
    positions: int = getattr(config, "max_position_embeddings", None) or mpt
    return positions - first_position(config)


def is_encoder(config: Any) -> bool:
    """Whether every token sees every other: nothing is generated, nothing cached."""
    return config.model_type in ENCODERS


def first_position(config: Any) -> int:
    """Return the position of the first token: RoBERTa's follow that of its padding."""
    return int(config.pad_token_id) + 1 if config.model_type == "roberta" else 0


def _linear_shape(config: Any, site: Site, parts: Sequence[LinearPart]) -> SiteShape:
    rows = tuple(p.weight.shape[0] for p in parts)
    elements = sum(p.weight.numel() for p in parts)
    routed = [p for p in parts if p.index is not None]
    if not routed:
        k = parts[0].weight.shape[1]
        return SiteShape(site, sum(rows), k, elements, parts=rows)
    # What one token goes through: some of the experts, and the shared one.
    for_all = elements - sum(p.weight.numel() for p in routed)
    experts = len(routed) // len({p.parameter for p in routed})
    read = (elements - for_all) * config.num_experts_per_tok // experts + for_all
    wide = site.component is Component.FFN_IN
    k = config.hidden_size if wide else read // config.hidden_size
    return SiteShape(
        site, read // k, k, elements, parts=rows, active_share=read / elements
    )


def _window(config: Any, attention: nn.Module) -> int | None:
    """Return how many tokens a layer looks back; None: all of them."""
    if hasattr(attention, "sliding_window"):
        window: Any = attention.sliding_window
        return window
    every_layer = getattr(config, "layer_types", None) is None
    return getattr(config, "sliding_window", None) if every_layer else None


def _layer_shapes(
    config: Any, index: int, layer: nn.Module, parts: dict[Site, list[LinearPart]]
) -> list[SiteShape]:
    def linear(component: Component) -> list[SiteShape]:
        site = Site(index, component)
        return [_linear_shape(config, site, parts[site])] if site in parts else []

    heads = heads_of(config)
    window = _window(config, attention_module(layer))

    def attended(component: Component) -> SiteShape:
        return SiteShape(
            Site(index, component),
            heads=heads.queries,
            kv_heads=heads.kv,
            head_dim=heads.dim,
            window=window,
        )

    inner = linear(Component.FFN_OUT)
    act = SiteShape(Site(index, Component.FFN_ACT), elements=inner[0].k if inner else 0)
    return [
        *linear(Component.ATTN_QKV),
        *([] if is_encoder(config) else [attended(Component.KV_CACHE)]),
        attended(Component.ATTN_SCORES),
        attended(Component.ATTN_SOFTMAX),
        attended(Component.ATTN_VALUES),
        *linear(Component.ATTN_OUT),
        *linear(Component.ROUTER),
        *linear(Component.FFN_IN),
        act,
        *linear(Component.FFN_OUT),
        _norms_shape(config, index, layer),
    ]


def _norms_shape(config: Any, index: int, layer: nn.Module) -> SiteShape:
    """Return the size of a layer's norms; with Q's and K's heads where they have some."""
    site, elements = Site(index, Component.NORMS), _normed(config, layer)
    heads = heads_of(config)
    inside: list[Any] = [m for m in attention_module(layer).modules() if is_norm(m)]
    if not any(m.weight.numel() == heads.dim for m in inside):
        return SiteShape(site, elements=elements)
    return SiteShape(
        site,
        elements=elements,
        heads=heads.queries,
        kv_heads=heads.kv,
        head_dim=heads.dim,
    )


def _normed(config: Any, layer: nn.Module) -> int:
    """Elements of the hidden states that a layer normalizes; norms of heads aside."""
    norms: list[Any] = [m for m in layer.modules() if is_norm(m)]
    widths = [m.weight.numel() for m in norms]
    return sum(width for width in widths if width == config.hidden_size)
