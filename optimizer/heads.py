"""How many heads a model has, and which rows of a projection are Q, K and V.

Fused projections come in two orders. `stacked` is all of Q, then K, then V (GPT-2,
Phi-3, MPT). `grouped` repeats, for each KV head, the query heads that read it, its K
and its V: GPT-NeoX has one query head in each group, Falcon as many as share a KV
head, and its multi-query form is a single group.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor


class Order(StrEnum):
    """Which rows a projection has, in which order."""

    Q = "q"
    K = "k"
    V = "v"
    STACKED = "stacked"
    GROUPED = "grouped"


@dataclass(frozen=True, slots=True)
class Heads:
    """The sizes of a layer's attention."""

    queries: int
    kv: int  # each serves queries / kv query heads
    dim: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Output rows by what they make: int64 indices, in the order of the heads."""

    q: Tensor
    k: Tensor
    v: Tensor


def heads_of(config: Any) -> Heads:
    """Return the heads of a model of transformers' `config`."""
    queries: int = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // queries
    return Heads(queries, _kv_heads(config), dim)


def _kv_heads(config: Any) -> int:
    queries: int = config.num_attention_heads
    if config.model_type != "falcon":
        return getattr(config, "num_key_value_heads", None) or queries
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else queries


def rows_of(order: Order, heads: Heads) -> Rows:
    """Return which rows of a projection of this order make Q, K and V."""
    none = torch.arange(0)
    q, kv = heads.queries * heads.dim, heads.kv * heads.dim
    if order is Order.Q:
        return Rows(torch.arange(q), none, none)
    if order is Order.K:
        return Rows(none, torch.arange(kv), none)
    if order is Order.V:
        return Rows(none, none, torch.arange(kv))
    every = torch.arange(q + 2 * kv)
    if order is Order.STACKED:
        return Rows(*every.split([q, kv, kv]))
    groups = every.view(heads.kv, heads.queries // heads.kv + 2, heads.dim)
    parts = groups[:, :-2], groups[:, -2], groups[:, -1]
    return Rows(*(part.flatten() for part in parts))
