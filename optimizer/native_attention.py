"""Attention as this processor runs it: a cache that is written in place, a fused kernel."""

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward


class Held(DynamicLayer):
    """One layer's K and V in memory that is there from the start: (batch, heads, tokens, dim)."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        filled: int,
        spent: list[float],
    ) -> None:
        super().__init__()
        self.keys, self.values = torch.zeros(2, *shape, dtype=dtype)
        self.is_initialized = True
        self._length = filled
        self._spent = spent

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new tokens' K and V, and return those of all tokens."""
        start = time.perf_counter()
        end = self._length + key_states.shape[-2]
        self.keys[:, :, self._length : end] = key_states
        self.values[:, :, self._length : end] = value_states
        self._length = end
        self._spent.append(time.perf_counter() - start)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        """Return how many tokens are held."""
        return self._length


def fused(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    **rest: Any,
) -> Tensor:
    """Run torch's fused kernel: (batch, heads, tokens, head_dim) -> (batch, tokens, heads, ·).

    A single query that sees everything brings its heads as the queries of the KV head
    that they share: torch's own way of sharing takes six times as long in bf16.
    """
    batch, heads, tokens, dim = query.shape
    if tokens > 1 or attention_mask is not None:
        rest.update(attention_mask=attention_mask, scaling=scaling)
        out, _ = sdpa_attention_forward(module, query, key, value, **rest)
        return out
    packed = query.reshape(batch, key.shape[1], heads // key.shape[1], dim)
    out = functional.scaled_dot_product_attention(packed, key, value, scale=scaling)
    return out.reshape(batch, 1, heads, value.shape[-1])
