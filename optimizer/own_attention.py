"""Attention that transformers computes inside the model: Falcon's and MPT's.

Every other architecture hands Q, K and V to transformers' attention interface. These
two multiply on their own, so their forward is written again here, up to that point.
Both may add a bias that grows with the distance (alibi): it rides on the mask, moved
by a constant for each row so that it is never negative where a token is visible.
Softmax does not see such a constant, and negative still means hidden.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

OWN_ATTENTION = frozenset({"FalconAttention", "MptAttention"})


class Attend(Protocol):
    """transformers' attention interface, as far as it is used here."""

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
    ) -> tuple[Tensor, None]:
        """Take (batch, heads, tokens, head_dim), return (batch, tokens, heads, head_dim)."""


def own_forward(attention: nn.Module, attend: Attend) -> Callable[..., Any] | None:
    """Return a forward that goes through `attend`; None: the module's own does."""
    kind = type(attention).__name__
    if kind not in OWN_ATTENTION:
        return None
    return (_falcon if kind == "FalconAttention" else _mpt)(attention, attend)


def _falcon(attention: Any, attend: Attend) -> Callable[..., Any]:
    """Q, K and V are grouped by KV head, in each of Falcon's three forms.

    With alibi the mask carries the bias already. transformers' eager attention adds
    it a second time, its sdpa attention, which this equals, does not.
    """

    def forward(
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        layer_past: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        batch, tokens, _ = hidden_states.shape
        dim = attention.head_dim
        kv = attention.num_kv_heads
        fused = attention.query_key_value(hidden_states)
        grouped = fused.view(batch, tokens, kv, -1, dim)
        query = grouped[:, :, :, :-2].flatten(2, 3).transpose(1, 2)
        key = grouped[:, :, :, -2].transpose(1, 2)
        value = grouped[:, :, :, -1].transpose(1, 2)
        if alibi is None:
            assert position_embeddings is not None
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if layer_past is not None:
            key, value = layer_past.update(key, value, attention.layer_idx)
        scaling = attention.inv_norm_factor
        out, _ = attend(attention, query, key, value, attention_mask, scaling=scaling)
        return attention.dense(out.flatten(2)), None

    return forward


def _mpt(attention: Any, attend: Attend) -> Callable[..., Any]:
    def forward(
        hidden_states: Tensor,
        position_bias: Tensor,
        attention_mask: Tensor,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        batch, tokens, _ = hidden_states.shape
        cache = kwargs.get("past_key_values", cache)  # its name until transformers 5.24
        fused = attention.Wqkv(hidden_states)
        if attention.clip_qkv:
            fused = fused.clamp(-attention.clip_qkv, attention.clip_qkv)
        query, key, value = (
            x.view(batch, tokens, attention.n_heads, -1).transpose(1, 2)
            for x in fused.chunk(3, dim=2)
        )
        if cache is not None:
            key, value = cache.update(key, value, attention.layer_idx)
        bias = position_bias[:, :, -key.shape[2] :]  # (heads, 1, keys)
        bias = bias - bias[:, :, :1]  # the farthest token's is the least
        mask = torch.where(attention_mask, torch.finfo(fused.dtype).min, bias)
        scaling = attention.softmax_scale
        out, _ = attend(attention, query, key, value, mask, scaling=scaling)
        return attention.out_proj(out.flatten(2)), None

    return forward
