"""Whole stacks, end to end, on held-out data: KL, perplexity, top-1 agreement.

Every stack sees the same tokens as the reference, sequence by sequence, so that
only one sequence's logits are in memory. Intervals are block bootstraps: tokens
near each other are not independent.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from optimizer.execute import Amaxes, Reference, Stacked, WeightCodes
from optimizer.metrics import (
    bootstrap_interval,
    logits_kl_nats,
    perplexity,
    token_nll,
    top1_agrees,
)
from optimizer.model import LoadedModel
from optimizer.stack import Stack

BOOTSTRAP_SAMPLES = 1000
BLOCK_TOKENS = 32
CONFIDENCE = 0.95

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and its bootstrap interval at `CONFIDENCE`."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Quality:
    """How far one stack is from the reference on the held-out tokens."""

    kl_nats: Interval
    perplexity: Interval
    top1_agreement: Interval
    worst_token_kl_nats: float
    p99_token_kl_nats: float


@dataclass(frozen=True, slots=True)
class Validation:
    """The reference and every stack on the same tokens."""

    tokens: int
    reference_perplexity: float
    stacks: Mapping[str, Quality]


@dataclass(slots=True)
class _Tokens:
    """Per-token values of one stack, in the order of the tokens."""

    kl: list[Values] = field(default_factory=list)
    nll: list[Values] = field(default_factory=list)
    agree: list[Values] = field(default_factory=list)


@torch.no_grad()
def validate(
    model: LoadedModel,
    sequences: Sequence[Tensor],
    stacks: Mapping[str, Stack],
    amaxes: Amaxes,
    weights: WeightCodes,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, planned: None,
) -> Validation:
    """Run every stack over `sequences` of ids (1, tokens)."""
    executors = {k: Stacked(s, amaxes, weights) for k, s in stacks.items()}
    seen = {name: _Tokens() for name in stacks}
    reference_nll: list[Tensor] = []
    planned = len(sequences) * (len(stacks) + 1)
    done = 0
    for ids in sequences:
        reference = model.forward(ids, Reference())[0]  # (tokens, vocab)
        p = reference.softmax(dim=-1)
        reference_nll.append(_nll(reference, ids))
        progress(done := done + 1, planned)
        for name, executor in executors.items():
            logits = model.forward(ids, executor)[0]
            _add(seen[name], (reference, p), logits, ids)
            progress(done := done + 1, planned)
    scored = torch.cat(reference_nll)
    return Validation(
        tokens=sum(ids.numel() for ids in sequences),
        reference_perplexity=perplexity(scored, torch.ones_like(scored).bool()),
        stacks={name: _quality(tokens, seed) for name, tokens in seen.items()},
    )


def _nll(logits: Tensor, ids: Tensor) -> Tensor:
    """Negative log-likelihood of each next token: T tokens make T - 1 predictions."""
    return token_nll(logits[None], ids)[0]


def _add(
    tokens: _Tokens, truth: tuple[Tensor, Tensor], logits: Tensor, ids: Tensor
) -> None:
    reference, p = truth
    tokens.kl.append(logits_kl_nats(reference, logits, p).double().numpy())
    tokens.nll.append(_nll(logits, ids).double().numpy())
    tokens.agree.append(top1_agrees(reference, logits).double().numpy())


def _quality(tokens: _Tokens, seed: int) -> Quality:
    kl, nll, agree = (np.concatenate(v) for v in (tokens.kl, tokens.nll, tokens.agree))
    log_perplexity = _interval(nll, seed)
    return Quality(
        kl_nats=_interval(kl, seed),
        perplexity=Interval(
            math.exp(log_perplexity.value),
            math.exp(log_perplexity.low),
            math.exp(log_perplexity.high),
        ),
        top1_agreement=_interval(agree, seed),
        worst_token_kl_nats=float(kl.max()),
        p99_token_kl_nats=float(np.quantile(kl, 0.99)),
    )


def _interval(values: Values, seed: int) -> Interval:
    low, high = bootstrap_interval(
        values,
        block=BLOCK_TOKENS,
        samples=BOOTSTRAP_SAMPLES,
        seed=seed,
        confidence=CONFIDENCE,
    )
    return Interval(float(values.mean()), low, high)
