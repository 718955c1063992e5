"""The sizes of a model's sites from its config.json alone: no weights, no torch.

`shapes.model_shape` reads the same off a network; a test holds the two against each
other, for every architecture.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from optimizer.errors import ModelError
from optimizer.families import FAMILIES, Config, Family
from optimizer.stack import WHOLE_MODEL, Component, ModelShape, Site, SiteShape

# Beyond these no model is known; they bound the time that an answer takes.
MAX_LAYERS = 1024
MAX_EXPERTS = 1024
MAX_SIZE = 1 << 24

_QKV, _OUT = Component.ATTN_QKV, Component.ATTN_OUT
_IN, _FFN_OUT = Component.FFN_IN, Component.FFN_OUT


@dataclass(frozen=True, slots=True)
class _Sizes:
    """A config, read by the names of its family and checked."""

    family: Family
    kind: str  # model_type
    config: Config

    def at(self, name: str, most: int = MAX_SIZE) -> int:
        """Return a size. Raises ModelError, naming the field, where it is none."""
        field_name = self.family.names.get(name, name)
        value = self.config.get(field_name)
        if type(value) is not int or not 0 < value <= most:
            raise ModelError(
                f"config.json: {field_name} must be a whole number from 1 to {most}, "
                f"not {str(value)[:40]}"
            )
        return value

    def given(self, name: str) -> bool:
        """Whether the config has a value under our name for it."""
        return self.config.get(self.family.names.get(name, name)) is not None

    @property
    def hidden(self) -> int:
        return self.at("hidden_size")

    @property
    def layers(self) -> int:
        return self.at("num_hidden_layers", MAX_LAYERS)

    @property
    def heads(self) -> int:
        return self.at("num_attention_heads", self.hidden)

    @property
    def head_dim(self) -> int:
        known = self.kind not in ("gpt2", "gptj", "falcon", "mpt")
        if known and self.given("head_dim"):
            return self.at("head_dim")
        return self.hidden // self.heads

    @property
    def kv_heads(self) -> int:
        if self.kind == "falcon":
            return self._falcon_kv_heads()
        if not self.given("num_key_value_heads"):
            return self.heads
        return self.at("num_key_value_heads", self.heads)

    def _falcon_kv_heads(self) -> int:
        if self.config["new_decoder_architecture"]:
            return self.at("num_kv_heads", self.heads)
        return 1 if self.config["multi_query"] else self.heads

    @property
    def inner(self) -> int:
        if self.kind == "mpt":
            return 4 * self.hidden  # transformers ignores expansion_ratio
        missing = self.kind in ("gpt2", "gptj", "falcon")
        if missing and not self.given("intermediate_size"):
            return 4 * self.hidden
        return self.at("intermediate_size")

    @property
    def norms(self) -> int:
        """Norms of the hidden states in a layer."""
        if self.kind != "falcon":
            return self.family.norms
        if self.config["new_decoder_architecture"]:
            return int(self.config["num_ln_in_parallel_attn"] or 2)
        return 1 if self.config["parallel_attn"] else 2

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        if "experts" not in self.family.names:
            return False
        step = self.at("decoder_sparse_step", MAX_LAYERS)
        dense = self.config["mlp_only_layers"] or ()
        return layer not in dense and (layer + 1) % step == 0

    def window(self, layer: int) -> int | None:
        """Return how many tokens a layer looks back; None: all of them."""
        if not self.given("sliding_window"):
            return None
        types = self.config.get("layer_types")
        if isinstance(types, list | tuple) and len(types) == self.layers:
            slides = types[layer] == "sliding_attention"
        else:
            slides = self.family.slides(layer, self.config)
        return self.at("sliding_window") if slides else None

    def biased(self, component: Component) -> bool:
        flag = self.family.biases.get(component, False)
        return bool(self.config[flag]) if isinstance(flag, str) else flag


def shape_of(config: Config, stored_bytes: int = 0) -> ModelShape:
    """Return the sizes of every site, in order, and of the model.

    `stored_bytes` is what the weights take on disk; 0: as bf16. Raises ModelError for
    an architecture that is not known, and naming the field that is no size.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        known = ", ".join(FAMILIES)
        raise ModelError(f"model_type {str(kind)[:80]!r} is not known; {known} are")
    sizes = _Sizes(family, str(kind), {**family.defaults, **_experts_named(config)})
    sites = tuple(_sites(sizes))
    tied = bool(sizes.config["tie_word_embeddings"])
    parameters = sum(s.weight_elements for s in sites) + _vectors(sizes)
    if tied:
        parameters -= sites[-1].weight_elements
    named = config.get("architectures")
    return ModelShape(
        architecture=str(named[0]) if isinstance(named, list) and named else str(kind),
        layers=sizes.layers,
        hidden=sizes.hidden,
        vocab=sizes.at("vocab_size"),
        max_context=_context(sizes),
        parameters=parameters,
        stored_bytes=stored_bytes or 2 * parameters,
        tied_embeddings=tied,
        sites=sites,
    )


def _experts_named(config: Config) -> Config:
    """Return the config with the number of experts under one of its two names."""
    experts = config.get("num_experts", config.get("num_local_experts"))
    return config if experts is None else {**config, "num_experts": experts}


def _context(sizes: _Sizes) -> int:
    """Return how many tokens go in at once; 0 where the config says nothing."""
    if not sizes.given("max_position_embeddings"):
        return 0
    positions = sizes.at("max_position_embeddings")
    if sizes.kind != "roberta":
        return positions
    padding = sizes.config.get(
        "pad_token_id", 1
    )  # its positions follow that of padding
    return max(0, positions - 1 - (padding if type(padding) is int else 1))


def _sites(sizes: _Sizes) -> Iterator[SiteShape]:
    hidden, vocab = sizes.hidden, sizes.at("vocab_size")
    rows = vocab
    if sizes.family.positions:
        rows += sizes.at("max_position_embeddings")
    if sizes.family.encoder:
        rows += int(sizes.config["type_vocab_size"])
    table = Site(WHOLE_MODEL, Component.EMBEDDINGS)
    yield SiteShape(table, vocab, hidden, rows * hidden)
    for layer in range(sizes.layers):
        yield from _layer(sizes, layer)
    yield SiteShape(Site(WHOLE_MODEL, Component.NORMS), elements=hidden)
    yield _linear(Site(WHOLE_MODEL, Component.LM_HEAD), hidden, (vocab,))


def _linear(site: Site, k: int, parts: tuple[int, ...]) -> SiteShape:
    return SiteShape(site, sum(parts), k, sum(parts) * k, parts=parts)


def _layer(sizes: _Sizes, layer: int) -> Iterator[SiteShape]:
    hidden, heads, kv, dim = sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_dim
    window = sizes.window(layer)

    def attended(component: Component) -> SiteShape:
        return SiteShape(
            Site(layer, component),
            heads=heads,
            kv_heads=kv,
            head_dim=dim,
            window=window,
        )

    qkv = (heads * dim, kv * dim, kv * dim)
    yield _linear(Site(layer, _QKV), hidden, _fused(sizes, _QKV, qkv))
    if not sizes.family.encoder:
        yield attended(Component.KV_CACHE)
    yield attended(Component.ATTN_SCORES)
    yield attended(Component.ATTN_SOFTMAX)
    yield attended(Component.ATTN_VALUES)
    yield _linear(Site(layer, _OUT), heads * dim, (hidden,))
    yield from (
        _experts(sizes, layer) if sizes.is_sparse(layer) else _dense(sizes, layer)
    )
    norms = SiteShape(Site(layer, Component.NORMS), elements=sizes.norms * hidden)
    if sizes.family.head_norms:
        norms = replace(norms, heads=heads, kv_heads=kv, head_dim=dim)
    yield norms


def _fused(
    sizes: _Sizes, component: Component, parts: tuple[int, ...]
) -> tuple[int, ...]:
    return (sum(parts),) if component in sizes.family.fused else parts


def _dense(sizes: _Sizes, layer: int) -> Iterator[SiteShape]:
    inner, hidden = sizes.inner, sizes.hidden
    parts = _fused(sizes, _IN, (inner, inner)) if sizes.family.gated else (inner,)
    yield _linear(Site(layer, _IN), hidden, parts)
    yield SiteShape(Site(layer, Component.FFN_ACT), elements=inner)
    yield _linear(Site(layer, _FFN_OUT), inner, (hidden,))


def _experts(sizes: _Sizes, layer: int) -> Iterator[SiteShape]:
    """Router and experts: of these, n · k is what one token reads."""
    hidden, experts = sizes.hidden, sizes.at("experts", MAX_EXPERTS)
    each, chosen = sizes.at("expert_size"), sizes.at("num_experts_per_tok", experts)
    shared = sizes.at("shared_size") if "shared_size" in sizes.family.names else 0
    read, whole = chosen * each + shared, experts * each + shared
    gates = (1,) if shared else ()
    yield _linear(Site(layer, Component.ROUTER), hidden, (experts, *gates))
    wide = (2 * each,) * experts + ((shared, shared) if shared else ())
    down = (hidden,) * (experts + len(gates))
    active = read / whole
    yield SiteShape(
        Site(layer, _IN),
        2 * read,
        hidden,
        2 * whole * hidden,
        parts=wide,
        active_share=active,
    )
    yield SiteShape(Site(layer, Component.FFN_ACT), elements=read)
    yield SiteShape(
        Site(layer, _FFN_OUT),
        hidden,
        read,
        whole * hidden,
        parts=down,
        active_share=active,
    )


def _vectors(sizes: _Sizes) -> int:
    """Parameters that belong to no matrix of a site: norms and biases."""
    hidden, per_norm = sizes.hidden, sizes.family.norm_weights
    rows = {
        _QKV: (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim,
        _OUT: hidden,
        _IN: 2 * sizes.inner if sizes.family.gated else sizes.inner,
        _FFN_OUT: hidden,
    }
    layer = sizes.norms * per_norm * hidden
    layer += sum(count for c, count in rows.items() if sizes.biased(c))
    layer += 2 * sizes.head_dim if sizes.family.head_norms else 0
    head = sizes.at("vocab_size") if sizes.biased(Component.LM_HEAD) else 0
    if sizes.family.encoder:  # norm of the embeddings; dense, norm and bias of the head
        return (
            layer * sizes.layers
            + 2 * per_norm * hidden
            + hidden * (hidden + 1)
            + sizes.at("vocab_size")
        )
    return layer * sizes.layers + per_norm * hidden + head
