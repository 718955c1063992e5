"""Whole stacks, end to end, on held-out data: KL, perplexity, top-1 agreement.

Every stack sees the same tokens as the reference, whose logits are kept. Intervals are block bootstraps: tokens
near each other are not independent.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from optimizer.execute import Amaxes, Reference, WeightCodes
from optimizer.metrics import (
    bootstrap_interval,
    logits_kl_nats,
    perplexity,
    token_nll,
    top1_agrees,
)
from optimizer.model import LoadedModel
from optimizer.overflow import Noting, Overflows
from optimizer.quantize import check_finite
from optimizer.stack import Stack
from optimizer.walk import Activations, Told, silent, walk

BOOTSTRAP_SAMPLES = 1000
BLOCK_TOKENS = 32
CONFIDENCE = 0.95
LOGIT_BYTES = 512 << 20  # of the reference, in memory; what is more lies in a file

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
    fallback: float  # share of the tokens of which a value goes beyond FP8


@dataclass(frozen=True, slots=True)
class Validation:
    """The reference and every stack on the same tokens."""

    tokens: int
    reference_perplexity: float
    stacks: Mapping[str, Quality]


@dataclass(frozen=True, slots=True, eq=False)
class TokenValues:
    """What a stack does to every token, in the order of the tokens."""

    kl: Values  # nats
    nll: Values  # nats, of each next token: one less for each sequence
    agree: Values  # 1 where the most likely token is the reference's
    overflowed: Values  # how many tokens of each sequence go beyond FP8


@dataclass(slots=True, eq=False)
class Truth:
    """The reference's logits on the held-out sequences of ids (1, tokens)."""

    sequences: Sequence[Tensor]
    logits: Activations  # by (0, sequence)
    nll: Values

    @classmethod
    def of(
        cls, model: LoadedModel, sequences: Sequence[Tensor], progress: Told = silent
    ) -> "Truth":
        """Run the reference once.

        Raises NonFiniteError naming the layer and the sample, which only held-out
        data may have: calibration saw others.
        """
        kept = Activations(LOGIT_BYTES)
        nll: list[Values] = []

        def after(stage: int, index: int, out: Tensor) -> None:
            check_finite(out, f"{_place(model, stage)}, held-out sample {index}")
            if stage == model.stages - 1:
                kept.put((0, index), out[0])
                nll.append(_nll(out[0], sequences[index]))

        _run(model, sequences, Reference(), after, progress)
        return cls(sequences, kept, np.concatenate(nll))


def _place(model: LoadedModel, stage: int) -> str:
    """Return what a stage is called: 0 embeddings, i + 1 layer i, the last logits."""
    inside = f"output of layers.{stage - 1}" if stage else "embeddings"
    return "logits" if stage == model.stages - 1 else inside


def run_stack(
    model: LoadedModel,
    truth: Truth,
    stack: Stack,
    amaxes: Amaxes,
    weights: WeightCodes,
    progress: Told = silent,
) -> TokenValues:
    """Run a stack over the held-out sequences."""
    kl: list[Values] = []
    nll: list[Values] = []
    agree: list[Values] = []
    executor, overflows = Noting(stack, amaxes, weights), Overflows(truth.sequences)

    def after(stage: int, index: int, out: Tensor) -> None:
        overflows.take(index, executor)
        if stage == model.stages - 1:
            reference, logits = truth.logits.get((0, index)), out[0]
            kl.append(logits_kl_nats(reference, logits).double().numpy())
            nll.append(_nll(logits, truth.sequences[index]))
            agree.append(top1_agrees(reference, logits).double().numpy())

    _run(model, truth.sequences, executor, after, progress)
    overflowed = np.array(overflows.counts, dtype=np.float64)
    return TokenValues(
        np.concatenate(kl), np.concatenate(nll), np.concatenate(agree), overflowed
    )


def _run(
    model: LoadedModel,
    sequences: Sequence[Tensor],
    executor: Reference,
    after: Callable[[int, int, Tensor], None],
    progress: Told,
) -> None:
    kept = Activations()
    walk(
        model,
        sequences,
        executor,
        kept=kept,
        after=after,
        keep_all=False,
        progress=progress,
    )


def validate(
    model: LoadedModel,
    sequences: Sequence[Tensor],
    stacks: Mapping[str, Stack],
    amaxes: Amaxes,
    weights: WeightCodes,
    *,
    seed: int = 0,
    progress: Told = silent,
) -> Validation:
    """Run every stack over `sequences` of ids (1, tokens)."""
    planned = len(stacks) + 1
    progress(0, planned)
    truth = Truth.of(model, sequences)
    found = {}
    for done, (name, stack) in enumerate(stacks.items()):
        progress(done + 1, planned)
        values = run_stack(model, truth, stack, amaxes, weights)
        found[name] = quality(values, seed)
    progress(planned, planned)
    return Validation(
        tokens=sum(ids.numel() for ids in sequences),
        reference_perplexity=reference_perplexity(truth.nll),
        stacks=found,
    )


def _nll(logits: Tensor, ids: Tensor) -> Values:
    """Negative log-likelihood of each next token: T tokens make T - 1 predictions."""
    values: Values = token_nll(logits[None], ids)[0].double().numpy()
    return values


def reference_perplexity(nll: Values) -> float:
    """Return the perplexity of predictions that all count: there is no padding."""
    every = torch.from_numpy(nll)
    return perplexity(every, torch.ones_like(every).bool())


def quality(values: TokenValues, seed: int) -> Quality:
    """Return the figures of a stack with their intervals."""
    kl = values.kl
    log_perplexity = _interval(values.nll, seed)
    return Quality(
        kl_nats=_interval(kl, seed),
        perplexity=Interval(
            math.exp(log_perplexity.value),
            math.exp(log_perplexity.low),
            math.exp(log_perplexity.high),
        ),
        top1_agreement=_interval(values.agree, seed),
        worst_token_kl_nats=float(kl.max()),
        p99_token_kl_nats=float(np.quantile(kl, 0.99)),
        fallback=float(values.overflowed.sum()) / len(kl),
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
