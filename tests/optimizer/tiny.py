"""Tiny models with random weights, from transformers' own config classes."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    BertConfig,
    DistilBertConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    RobertaConfig,
)

from optimizer.model import LoadedModel, instrument

VOCAB = 97
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Every architecture has these sizes under names of its own.
WIDTH, INNER, LAYERS, HEADS, KV_HEADS, CONTEXT = 32, 48, 2, 4, 2, 64
PLAIN = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": CONTEXT,
    **TOKENS,
}
COMMON = {**PLAIN, "num_key_value_heads": KV_HEADS, "head_dim": WIDTH // HEADS}
WINDOW = {"sliding_window": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FALCON = {**PLAIN, "ffn_hidden_size": INNER, "alibi": False}
del FALCON["intermediate_size"]
LONG_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

MAKERS: dict[str, Callable[[], Any]] = {
    "LlamaForCausalLM": lambda: LlamaConfig(**COMMON),
    "Qwen2ForCausalLM": lambda: Qwen2Config(**COMMON),
    "Qwen3ForCausalLM": lambda: Qwen3Config(**COMMON),
    "MistralForCausalLM": lambda: MistralConfig(**COMMON, **WINDOW),
    "Gemma2ForCausalLM": lambda: Gemma2Config(
        **COMMON, **WINDOW, attn_logit_softcapping=50.0
    ),
    "Gemma3ForCausalLM": lambda: Gemma3TextConfig(
        **COMMON, **WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "Phi3ForCausalLM": lambda: Phi3Config(**COMMON),
    "GPT2LMHeadModel": lambda: GPT2Config(
        vocab_size=VOCAB,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=CONTEXT,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "GPTNeoXForCausalLM": lambda: GPTNeoXConfig(**PLAIN),
    "FalconForCausalLM": lambda: FalconConfig(**FALCON, multi_query=True),
    "MptForCausalLM": lambda: MptConfig(
        vocab_size=VOCAB,
        d_model=WIDTH,
        n_layers=LAYERS,
        n_heads=HEADS,
        max_seq_len=CONTEXT,
        **TOKENS,
    ),
    "MixtralForCausalLM": lambda: MixtralConfig(
        **COMMON, num_local_experts=4, num_experts_per_tok=2
    ),
    "Qwen2MoeForCausalLM": lambda: Qwen2MoeConfig(
        **COMMON, **EXPERTS, num_experts=4, shared_expert_intermediate_size=24
    ),
    "Qwen3MoeForCausalLM": lambda: Qwen3MoeConfig(**COMMON, **EXPERTS, num_experts=4),
    "BertForMaskedLM": lambda: BertConfig(**PLAIN),
    "RobertaForMaskedLM": lambda: RobertaConfig(**PLAIN),
    "DistilBertForMaskedLM": lambda: DistilBertConfig(
        vocab_size=VOCAB,
        dim=WIDTH,
        hidden_dim=INNER,
        n_layers=LAYERS,
        n_heads=HEADS,
        max_position_embeddings=CONTEXT,
        pad_token_id=0,
    ),
}
# Other forms of the same architectures, as `Architecture/form`.
FORMS: dict[str, Callable[[], Any]] = {
    "LlamaForCausalLM/llama3": lambda: LlamaConfig(
        **COMMON, rope_parameters=LONG_ROPE, attention_bias=True, mlp_bias=True
    ),
    "LlamaForCausalLM/heads": lambda: LlamaConfig(**PLAIN),
    "Qwen2ForCausalLM/windows": lambda: Qwen2Config(
        **COMMON, **WINDOW, use_sliding_window=True, max_window_layers=1
    ),
    "Phi3ForCausalLM/windows": lambda: Phi3Config(**COMMON, **WINDOW),
    "GPTNeoXForCausalLM/serial": lambda: GPTNeoXConfig(
        **PLAIN, use_parallel_residual=False, attention_bias=True
    ),
    "FalconForCausalLM/groups": lambda: FalconConfig(
        **FALCON, new_decoder_architecture=True, num_kv_heads=KV_HEADS
    ),
    "FalconForCausalLM/heads": lambda: FalconConfig(
        **FALCON, multi_query=False, parallel_attn=False, bias=True
    ),
    "FalconForCausalLM/alibi": lambda: FalconConfig(
        **{**FALCON, "alibi": True}, multi_query=False, parallel_attn=False, bias=True
    ),
    "MptForCausalLM/clipped": lambda: MptConfig(
        vocab_size=VOCAB,
        d_model=WIDTH,
        n_layers=LAYERS,
        n_heads=HEADS,
        max_seq_len=CONTEXT,
        attn_config={"clip_qkv": 0.5, "softmax_scale": 0.3},
        **TOKENS,
    ),
    "MixtralForCausalLM/windows": lambda: MixtralConfig(
        **COMMON, **WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),
    "Qwen2MoeForCausalLM/shares": lambda: Qwen2MoeConfig(
        **COMMON,
        **EXPERTS,
        num_experts=4,
        shared_expert_intermediate_size=24,
        norm_topk_prob=True,
    ),
    "Qwen3MoeForCausalLM/dense": lambda: Qwen3MoeConfig(
        **COMMON, **EXPERTS, num_experts=4, mlp_only_layers=[0]
    ),
}


def network(architecture: str = "LlamaForCausalLM", seed: int = 0) -> nn.Module:
    """Return a network in evaluation mode, its logits far from uniform."""
    config = {**MAKERS, **FORMS}[architecture]()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made: nn.Module = getattr(transformers, architecture.partition("/")[0])(config)
    generator = torch.Generator().manual_seed(seed + 1)
    norms = torch.Generator().manual_seed(seed + 2)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.ndim >= 2:  # transformers starts at 0.02: nothing would matter
                weight.normal_(0.0, 0.25, generator=generator)
            elif "bias" in name:  # and biases at 0: a lost one would not show
                weight.normal_(0.0, 0.1, generator=generator)
            else:  # nor would a lost norm
                weight.add_(torch.randn(weight.shape, generator=norms), alpha=0.1)
    return made.eval().requires_grad_(False)


def loaded(architecture: str = "LlamaForCausalLM", seed: int = 0) -> LoadedModel:
    """Return the same network with its sites routed."""
    made = network(architecture, seed)
    return instrument(made, type(made).__name__)


def ids(tokens: int = 24, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Return random token ids (batch, tokens), none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, tokens), generator=generator)
