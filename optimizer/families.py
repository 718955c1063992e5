"""How transformers builds the models of each `model_type`, where that decides a size.

Which matrices are fused, what carries a bias, which layers look back how far, under
which names a config has its sizes, and what it means where it leaves a field out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from optimizer.stack import Component

Config = Mapping[str, Any]
Flag = str | bool  # True: always; else the field that says so
Slides = Callable[
    [int, Config], bool
]  # (layer, config): does it look back so far only?


@dataclass(frozen=True, slots=True)
class Family:
    """How the models of one `model_type` are built."""

    names: Mapping[str, str] = field(default_factory=dict)  # ours to the config's
    defaults: Mapping[str, Any] = field(default_factory=dict)
    gated: bool = True  # gate and up beside each other
    fused: frozenset[Component] = frozenset()  # several matrices in one tensor
    biases: Mapping[Component, Flag] = field(default_factory=dict)
    norms: int = 2  # of the hidden states, in a layer
    norm_weights: int = 1  # vectors of a norm: LayerNorm has a bias beside its weight
    head_norms: bool = False  # one of Q's heads and one of K's
    slides: Slides = lambda layer, config: False
    positions: bool = False  # a table of positions beside that of tokens
    encoder: bool = False


_QKV, _OUT = Component.ATTN_QKV, Component.ATTN_OUT
_IN, _FFN_OUT = Component.FFN_IN, Component.FFN_OUT
_UNTIED: Config = {"tie_word_embeddings": False}
_TIED: Config = {"tie_word_embeddings": True}
_ATTENTION = {_QKV: "attention_bias", _OUT: "attention_bias"}
_EVERY = dict.fromkeys((_QKV, _OUT, _IN, _FFN_OUT), True)
_GPT = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}


def _always(layer: int, config: Config) -> bool:
    return True


def _from_a_layer_on(layer: int, config: Config) -> bool:
    return bool(config["use_sliding_window"]) and layer >= config["max_window_layers"]


def _every_other(layer: int, config: Config) -> bool:
    windows = config["use_sliding_window"] and layer < config["max_window_layers"]
    return bool(windows) and layer % 2 == 0


def _where_used(layer: int, config: Config) -> bool:
    return bool(config["use_sliding_window"])


def _but_every(step: int) -> Slides:
    return lambda layer, config: (layer + 1) % step != 0


_QWEN: Config = {
    **_UNTIED,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "attention_bias": False,
}
_MOE: Config = {**_QWEN, "mlp_only_layers": None, "decoder_sparse_step": 1}
_GEMMA: Config = {
    **_TIED,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "attention_bias": False,
}
_BERT = Family(
    defaults={**_TIED, "type_vocab_size": 2},
    gated=False,
    biases=_EVERY,
    norm_weights=2,
    positions=True,
    encoder=True,
)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(
            defaults={**_UNTIED, "attention_bias": False, "mlp_bias": False},
            biases={**_ATTENTION, _IN: "mlp_bias", _FFN_OUT: "mlp_bias"},
        ),
        "qwen2": Family(
            defaults={**_QWEN, "num_key_value_heads": 32},
            biases={_QKV: True},
            slides=_from_a_layer_on,
        ),
        "qwen3": Family(
            defaults={**_QWEN, "num_key_value_heads": 32, "head_dim": 128},
            biases=_ATTENTION,
            head_norms=True,
            slides=_from_a_layer_on,
        ),
        "mistral": Family(
            defaults={**_UNTIED, "num_key_value_heads": 8, "sliding_window": 4096},
            slides=_always,
        ),
        "gemma2": Family(
            defaults=_GEMMA, biases=_ATTENTION, norms=4, slides=_but_every(2)
        ),
        "gemma3_text": Family(
            defaults=_GEMMA,
            biases=_ATTENTION,
            norms=4,
            head_norms=True,
            slides=_but_every(6),
        ),
        "phi3": Family(
            defaults={**_UNTIED, "sliding_window": None},
            fused=frozenset({_QKV, _IN}),
            slides=_always,
        ),
        "gpt2": Family(
            names=_GPT,
            defaults=_TIED,
            gated=False,
            fused=frozenset({_QKV}),
            biases=_EVERY,
            norm_weights=2,
            positions=True,
        ),
        "gptj": Family(
            names=_GPT,
            defaults=_UNTIED,
            gated=False,
            biases={_IN: True, _FFN_OUT: True, Component.LM_HEAD: True},
            norms=1,  # attention and MLP read the same
            norm_weights=2,
        ),
        "gpt_neox": Family(
            defaults={**_UNTIED, "attention_bias": True},
            gated=False,
            fused=frozenset({_QKV}),
            biases={**_ATTENTION, _IN: True, _FFN_OUT: True},
            norm_weights=2,
        ),
        "falcon": Family(
            names={"intermediate_size": "ffn_hidden_size"},
            defaults={
                **_TIED,
                "multi_query": True,
                "parallel_attn": True,
                "new_decoder_architecture": False,
                "num_ln_in_parallel_attn": None,
                "bias": False,
            },
            gated=False,
            fused=frozenset({_QKV}),
            biases=dict.fromkeys(_EVERY, "bias"),
            norm_weights=2,
        ),
        "mpt": Family(
            names={
                "hidden_size": "d_model",
                "num_hidden_layers": "n_layers",
                "num_attention_heads": "n_heads",
                "max_position_embeddings": "max_seq_len",
            },
            defaults=_TIED,
            gated=False,
            fused=frozenset({_QKV}),
        ),
        "mixtral": Family(
            defaults={
                **_UNTIED,
                "num_key_value_heads": 8,
                "sliding_window": None,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "mlp_only_layers": None,
                "decoder_sparse_step": 1,
            },
            names={"experts": "num_experts", "expert_size": "intermediate_size"},
            slides=_always,
        ),
        "qwen2_moe": Family(
            defaults={**_MOE, "num_key_value_heads": 16, "qkv_bias": True},
            names={
                "experts": "num_experts",
                "expert_size": "moe_intermediate_size",
                "shared_size": "shared_expert_intermediate_size",
            },
            biases={_QKV: "qkv_bias"},
            slides=_every_other,
        ),
        "qwen3_moe": Family(
            defaults={**_MOE, "num_key_value_heads": 4},
            names={"experts": "num_experts", "expert_size": "moe_intermediate_size"},
            biases=_ATTENTION,
            head_norms=True,
            slides=_where_used,
        ),
        "bert": _BERT,
        "roberta": _BERT,
        "distilbert": Family(
            names={
                "hidden_size": "dim",
                "num_hidden_layers": "n_layers",
                "num_attention_heads": "n_heads",
                "intermediate_size": "hidden_dim",
            },
            defaults={**_TIED, "type_vocab_size": 0},
            gated=False,
            biases=_EVERY,
            norm_weights=2,
            positions=True,
            encoder=True,
        ),
    }
)
