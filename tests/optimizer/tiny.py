"""Tiny models with random weights, from transformers' own config classes."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from optimizer.model import ATTENTION, LoadedModel, instrument

VOCAB = 97
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # grouped queries
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 8}

MAKERS: dict[str, Callable[[], nn.Module]] = {
    "LlamaForCausalLM": lambda: LlamaForCausalLM(LlamaConfig(**COMMON)),
    "Qwen2ForCausalLM": lambda: Qwen2ForCausalLM(Qwen2Config(**COMMON)),
    "Qwen3ForCausalLM": lambda: Qwen3ForCausalLM(Qwen3Config(**COMMON)),
    "MistralForCausalLM": lambda: MistralForCausalLM(MistralConfig(**COMMON, **WINDOW)),
    "Gemma2ForCausalLM": lambda: Gemma2ForCausalLM(
        Gemma2Config(**COMMON, **WINDOW, attn_logit_softcapping=50.0)
    ),
    "Gemma3ForCausalLM": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **COMMON, **WINDOW, layer_types=["sliding_attention", "full_attention"]
        )
    ),
    "Phi3ForCausalLM": lambda: Phi3ForCausalLM(Phi3Config(**COMMON)),
    "GPT2LMHeadModel": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            bos_token_id=1,
            eos_token_id=2,
        )
    ),
}


def network(architecture: str = "LlamaForCausalLM", seed: int = 0) -> nn.Module:
    """Return a network in evaluation mode, its logits far from uniform."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = MAKERS[architecture]()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.ndim == 2:  # transformers starts at 0.02: nothing would matter
                weight.normal_(0.0, 0.25, generator=generator)
            elif "bias" in name:  # and biases at 0: a lost one would not show
                weight.normal_(0.0, 0.1, generator=generator)
    return made.eval().requires_grad_(False)


def loaded(architecture: str = "LlamaForCausalLM", seed: int = 0) -> LoadedModel:
    """Return the same network with its sites routed."""
    made = network(architecture, seed)
    made.set_attn_implementation(ATTENTION)  # type: ignore[operator]
    return instrument(made, architecture)


def ids(tokens: int = 24, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Return random token ids (batch, tokens), none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, tokens), generator=generator)
