"""Where a network's sites are: its matrices, norms and activations.

Names are read from the module tree. What carries weights and is not recognized is
listed with a reason; nothing is dropped silently.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from optimizer.errors import ModelError
from optimizer.heads import Heads, Order, Rows, heads_of, rows_of
from optimizer.stack import WHOLE_MODEL, Component, Site

# Where a layer keeps its matrices, by the names that transformers gives them.
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
    "attention.query_key_value": Component.ATTN_QKV,  # GPT-NeoX: fused
    "attention.dense": Component.ATTN_OUT,
    "self_attention.query_key_value": Component.ATTN_QKV,  # Falcon: fused
    "self_attention.dense": Component.ATTN_OUT,
    "mlp.dense_h_to_4h": Component.FFN_IN,  # GPT-NeoX and Falcon
    "mlp.dense_4h_to_h": Component.FFN_OUT,
    "attn.Wqkv": Component.ATTN_QKV,  # MPT: fused
    "attn.out_proj": Component.ATTN_OUT,
    "ffn.up_proj": Component.FFN_IN,
    "ffn.down_proj": Component.FFN_OUT,
    "attention.self.query": Component.ATTN_QKV,  # BERT and RoBERTa
    "attention.self.key": Component.ATTN_QKV,
    "attention.self.value": Component.ATTN_QKV,
    "attention.output.dense": Component.ATTN_OUT,
    "intermediate.dense": Component.FFN_IN,
    "output.dense": Component.FFN_OUT,
    "attention.q_lin": Component.ATTN_QKV,  # DistilBERT
    "attention.k_lin": Component.ATTN_QKV,
    "attention.v_lin": Component.ATTN_QKV,
    "attention.out_lin": Component.ATTN_OUT,
    "ffn.lin1": Component.FFN_IN,
    "ffn.lin2": Component.FFN_OUT,
    "mlp.shared_expert.gate_proj": Component.FFN_IN,  # Qwen2-MoE
    "mlp.shared_expert.up_proj": Component.FFN_IN,
    "mlp.shared_expert.down_proj": Component.FFN_OUT,
    "mlp.shared_expert_gate": Component.ROUTER,
}
ROUTER = "mlp.gate"  # Mixtral and Qwen-MoE: a module with a weight, not a Linear
EXPERTS = "mlp.experts"  # all of a layer's experts, in two parameters (expert, out, in)
EXPERT_PARTS = {
    "gate_up_proj": Component.FFN_IN,
    "down_proj": Component.FFN_OUT,
}
SHARED_EXPERT = "mlp.shared_expert"
QKV_ORDER = {
    "self_attn.q_proj": Order.Q,
    "self_attn.k_proj": Order.K,
    "self_attn.v_proj": Order.V,
    "self_attn.qkv_proj": Order.STACKED,
    "attn.c_attn": Order.STACKED,
    "attn.Wqkv": Order.STACKED,
    "attention.query_key_value": Order.GROUPED,
    "self_attention.query_key_value": Order.GROUPED,
    "attention.self.query": Order.Q,
    "attention.self.key": Order.K,
    "attention.self.value": Order.V,
    "attention.q_lin": Order.Q,
    "attention.k_lin": Order.K,
    "attention.v_lin": Order.V,
}
ACTIVATIONS = frozenset(
    {
        "mlp.act_fn",
        "mlp.activation_fn",
        "mlp.act",
        "ffn.act",
        "ffn.activation",
        "intermediate.intermediate_act_fn",
        "mlp.experts.act_fn",
        "mlp.shared_expert.act_fn",
    }
)
LAYER_LISTS = (
    "model.layers",
    "transformer.h",
    "gpt_neox.layers",
    "transformer.blocks",
    "bert.encoder.layer",
    "roberta.encoder.layer",
    "distilbert.transformer.layer",
)
# What stands between an encoder's last layer and its vocabulary.
MASKED_LM_DENSE = frozenset(
    {"cls.predictions.transform.dense", "lm_head.dense", "vocab_transform"}
)


@dataclass(frozen=True, slots=True, eq=False)
class LinearPart:
    """One matrix of a site: q_proj of attn_qkv, say, or one expert's of ffn_in."""

    site: Site
    name: str  # as named_modules() spells it; experts have their number in it
    module: nn.Module
    parameter: str = "weight"
    index: int | None = None  # which expert of a parameter (expert, out, in)
    group: str = ""  # parts of a site with one group are one matrix in an engine
    order: Order | None = None  # of the rows, where they are Q, K or V
    heads: Heads | None = None

    @property
    def stored(self) -> Tensor:
        """The parameter that holds the matrix, perhaps with others."""
        return cast(Tensor, getattr(self.module, self.parameter))

    @property
    def weight(self) -> Tensor:
        """The matrix as (out, in), whichever way the module stores it."""
        if self.index is not None:
            return self.stored[self.index]
        return self.stored.T if isinstance(self.module, Conv1D) else self.stored

    @property
    def bias(self) -> Tensor | None:
        """The (out,) bias, or None."""
        bias: Tensor | None = getattr(self.module, "bias", None)
        return bias


def kv_rows(part: LinearPart) -> Rows:
    """Return which output rows of a part are Q, K and V.

    Raises ModelError, naming the part, where it makes none of them.
    """
    if part.order is None or part.heads is None:
        raise ModelError(f"{part.name} makes no keys or values that are known")
    return rows_of(part.order, part.heads)


@dataclass(frozen=True, slots=True)
class Unrecognized:
    """A module with weights that no site covers."""

    module: str
    reason: str
    parameters: int


def find_layers(network: nn.Module) -> nn.ModuleList:
    """Return the layers. Raises ModelError where no known path has them."""
    for path in LAYER_LISTS:
        try:
            found = network.get_submodule(path)
        except AttributeError:
            continue
        if isinstance(found, nn.ModuleList):
            return found
    raise ModelError(f"no layers at {' or '.join(LAYER_LISTS)}")


def name_of(network: nn.Module, module: nn.Module) -> str:
    """Return the name of a module as `named_modules` spells it."""
    return next(n for n, m in network.named_modules() if m is module)


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by a matrix: subclasses count, and GPT-2's Conv1D."""
    return isinstance(module, nn.Linear | Conv1D)


def linear_parts(network: nn.Module, layers: nn.ModuleList) -> Iterator[LinearPart]:
    """Yield every matrix that belongs to a site, layer by layer."""
    prefix = name_of(network, layers)
    heads = heads_of(network.config)
    for index, layer in enumerate(layers):
        for path, module in layer.named_modules():
            name = f"{prefix}.{index}.{path}"
            if path == ROUTER and type(module).__name__.endswith("Router"):
                yield LinearPart(Site(index, Component.ROUTER), name, module)
            elif path == EXPERTS:
                yield from _expert_parts(index, name, module)
            elif path in LINEAR_PARTS and is_linear(module):
                yield _linear_part(index, name, path, module, heads)
    head = lm_head(network)
    if head is not None:
        site = Site(WHOLE_MODEL, Component.LM_HEAD)
        yield LinearPart(site, name_of(network, head), head)


def _linear_part(
    index: int, name: str, path: str, module: nn.Module, heads: Heads
) -> LinearPart:
    return LinearPart(
        Site(index, LINEAR_PARTS[path]),
        name,
        module,
        group=SHARED_EXPERT if path.startswith(SHARED_EXPERT) else "",
        order=QKV_ORDER.get(path),
        heads=heads if path in QKV_ORDER else None,
    )


def _expert_parts(index: int, name: str, experts: nn.Module) -> Iterator[LinearPart]:
    """Yield the matrices of every expert: gate and up are one, as engines fuse them."""
    for parameter, component in EXPERT_PARTS.items():
        stored = getattr(experts, parameter, None)
        if not isinstance(stored, nn.Parameter) or stored.ndim != 3:
            continue
        for expert in range(len(stored)):
            yield LinearPart(
                Site(index, component),
                f"{name}.{expert}.{parameter}",
                experts,
                parameter,
                expert,
                group=f"{EXPERTS}.{expert}",
            )


def lm_head(network: nn.Module) -> nn.Module | None:
    """Return the matrix that makes logits of hidden states, if there is one."""
    find: Any = getattr(network, "get_output_embeddings", lambda: None)
    head = find()
    return head if isinstance(head, nn.Module) and is_linear(head) else None


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalizes: LayerNorm and everybody's RMSNorm."""
    return isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("Norm")


def find_unrecognized(
    network: nn.Module, parts: dict[Site, list[LinearPart]]
) -> Iterator[Unrecognized]:
    """Yield every module with weights of its own that no site covers."""
    every = [p for some in parts.values() for p in some]
    seen = {id(t) for p in every for t in (p.stored, p.bias)}
    for module in network.modules():
        if is_norm(module) or isinstance(module, nn.Embedding):
            seen |= {id(p) for p in module.parameters(recurse=False)}
    for path, module in network.named_modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        if own:
            seen |= {id(p) for p in own}
            count = sum(p.numel() for p in own)
            yield Unrecognized(path, _reason(path, module), count)


def _reason(path: str, module: nn.Module) -> str:
    kind = type(module).__name__
    if path in MASKED_LM_DENSE:
        return "the dense layer of a masked-LM head: no site, it stays as it is"
    if is_linear(module):
        return f"a {kind} at a place that no site of this architecture names"
    return f"{kind} is not a kind of module that sites are made of"


def coverage_percent(network: nn.Module, unrecognized: Sequence[Unrecognized]) -> float:
    """Return the share of the parameters that some site covers, 0 to 100."""
    total = sum(p.numel() for p in network.parameters())  # tied weights count once
    left = sum(u.parameters for u in unrecognized)
    return 100.0 * (total - left) / total


def attention_module(layer: nn.Module) -> nn.Module:
    """Return the attention of a layer, the innermost of BERT's that are called so.

    Raises ModelError where there is none.
    """
    found = [m for m in layer.modules() if type(m).__name__.endswith("Attention")]
    for module in found:
        inside = {id(m) for m in module.modules()} - {id(module)}
        if not any(id(other) in inside for other in found):
            return module
    raise ModelError(f"no attention in {type(layer).__name__}")
