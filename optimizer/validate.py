"""Whole stacks, end to end, on held-out data: KL, perplexity, top-1 agreement.

Every stack sees the same tokens as the reference, whose logits are kept. Intervals are block bootstraps: tokens
near each other are not independent.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from optimizer.batches import batches, heads, layers, together
from optimizer.execute import Amaxes, Reference, WeightCodes
from optimizer.metrics import bootstrap_interval, kl_and_log_sums, perplexity
from optimizer.model import LoadedModel
from optimizer.on_device import executor
from optimizer.overflow import Noting
from optimizer.quantize import check_finite
from optimizer.stack import Stack
from optimizer.walk import Activations, Told, silent

BOOTSTRAP_SAMPLES = 1000
BLOCK_TOKENS = 32
CONFIDENCE = 0.95
ROWS = 32  # of logits that are compared at a time: they stay in the cache
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
    overflowed: Values  # how many tokens of each batch go beyond FP8
    likely: Values  # the most likely token's id


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """What is known of the reference's logits on one sequence."""

    log_sums: Tensor  # (tokens,): log Σ e^logits
    likely: Tensor  # (tokens,): the most likely token

    def nll(self, logits: Tensor, ids: Tensor, more: Tensor | None = None) -> Values:
        """Return the loss of each next token: T tokens make T - 1 predictions.

        `more` is what log Σ e^logits has beyond the reference's.
        """
        sums = self.log_sums if more is None else self.log_sums + more
        nll = sums[:-1] - logits[:-1].gather(1, ids[0, 1:, None])[:, 0]
        return nll.double().numpy()


@dataclass(slots=True, eq=False)
class Truth:
    """The reference's logits on the held-out sequences of ids (1, tokens)."""

    sequences: Sequence[Tensor]
    logits: Activations  # by (0, sequence)
    known: Sequence[_Known]  # by sequence
    nll: Values

    @property
    def likely(self) -> Values:
        """The id of the most likely token at every position."""
        return np.concatenate([k.likely.double().numpy() for k in self.known])

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        sequences: Sequence[Tensor],
        progress: Told = silent,
        states: Sequence[Tensor] | None = None,
    ) -> "Truth":
        """Run the reference once; of it only the head where its `states` are known.

        Raises NonFiniteError naming the layer and the sample, which only held-out
        data may have: calibration saw others.
        """
        if states is None:
            states = reference_states(model, sequences, progress)
        kept = Activations(LOGIT_BYTES)
        known, nll = [], []
        with torch.no_grad():
            for index, (ids, state) in enumerate(zip(sequences, states, strict=True)):
                (logits,) = heads(model, ids, state, Reference())
                check_finite(logits, f"logits, held-out sample {index}")
                kept.put((0, index), logits)
                known.append(_Known(logits.logsumexp(-1), logits.argmax(-1)))
                nll.append(known[-1].nll(logits, ids))
        return cls(sequences, kept, known, np.concatenate(nll))


def reference_states(
    model: LoadedModel, sequences: Sequence[Tensor], progress: Told = silent
) -> list[Tensor]:
    """Return what norm and head get of every sequence in fp32: (1, tokens, hidden).

    Raises NonFiniteError naming the layer and the sample.
    """
    groups = batches(sequences)

    def after(stage: int, batch: int, out: Tensor) -> None:
        inside = f"output of layers.{stage - 1}" if stage else "embeddings"
        for row, index in zip(out, groups[batch], strict=True):
            check_finite(row, f"{inside}, held-out sample {index}")

    every = [together(sequences, numbers) for numbers in groups]
    states = layers(model, every, Reference(), after, progress)
    return [row for hidden in states for row in hidden.split(1)]


def run_stack(
    model: LoadedModel,
    truth: Truth,
    stack: Stack,
    amaxes: Amaxes,
    weights: WeightCodes,
    progress: Told = silent,
) -> TokenValues:
    """Run a stack over the held-out sequences, on FP8 units where this process has some."""
    groups = batches(truth.sequences)
    every = [together(truth.sequences, numbers) for numbers in groups]
    run, beyond = executor(stack, amaxes, weights), [_Beyond(ids) for ids in every]

    def after(stage: int, batch: int, out: Tensor) -> None:
        beyond[batch].take(run)

    found = []
    states = layers(model, every, run, after, progress)
    with torch.no_grad():
        for batch, (numbers, hidden) in enumerate(zip(groups, states, strict=True)):
            logits = heads(model, every[batch], hidden, run)
            for row, (index, mine) in enumerate(zip(numbers, logits, strict=True)):
                beyond[batch].take(run, slice(row, row + 1))
                found.append(_compared(truth, index, mine))
    kl, nll, agree, likely = (np.concatenate(v) for v in zip(*found, strict=True))
    counts = np.array([some.count for some in beyond], np.float64)
    return TokenValues(kl, nll, agree, counts, likely)


def _compared(
    truth: Truth, index: int, logits: Tensor
) -> tuple[Values, Values, Values, Values]:
    """Return KL, loss, agreement and most likely tokens of one sequence."""
    reference, known = truth.logits.get((0, index)), truth.known[index]
    parts = zip(reference.split(ROWS), logits.split(ROWS), strict=True)
    kl, more = (
        torch.cat(v)
        for v in zip(*(kl_and_log_sums(a, b) for a, b in parts), strict=True)
    )
    likely = logits.argmax(-1)
    agree = known.likely == likely
    nll = known.nll(logits, truth.sequences[index], more)
    return kl.double().numpy(), nll, agree.double().numpy(), likely.double().numpy()


class _Beyond:
    """Which tokens of a batch of ids (batch, tokens) go beyond FP8, at any stage."""

    def __init__(self, ids: Tensor) -> None:
        self._tokens = torch.zeros(ids.shape, dtype=torch.bool)
        self._expert_rows = 0

    def take(self, run: Noting, rows: slice = slice(None)) -> None:
        """Take what was noted of one stage of the batch, or of some of its rows."""
        if run.tokens is not None:
            self._tokens[rows] |= run.tokens
        self._expert_rows += run.expert_rows
        run.begin()

    @property
    def count(self) -> int:
        """How many tokens they are, rows of experts counted as tokens: at most all."""
        tokens = int(self._tokens.sum()) + self._expert_rows
        return min(self._tokens.numel(), tokens)


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


def reference_perplexity(nll: Values) -> float:
    """Return the perplexity of predictions that all count: there is no padding."""
    every = torch.from_numpy(nll)
    return perplexity(every, torch.ones_like(every).bool())


def quality(values: TokenValues, seed: int) -> Quality:
    """Return the figures of a stack with their intervals."""
    kl = values.kl
    log_perplexity = interval(values.nll, seed)
    return Quality(
        kl_nats=interval(kl, seed),
        perplexity=Interval(
            math.exp(log_perplexity.value),
            math.exp(log_perplexity.low),
            math.exp(log_perplexity.high),
        ),
        top1_agreement=interval(values.agree, seed),
        worst_token_kl_nats=float(kl.max()),
        p99_token_kl_nats=float(np.quantile(kl, 0.99)),
        fallback=float(values.overflowed.sum()) / len(kl),
    )


def interval(values: Values, seed: int) -> Interval:
    """Return the mean of values in text order, with its interval."""
    low, high = bootstrap_interval(
        values,
        block=BLOCK_TOKENS,
        samples=BOOTSTRAP_SAMPLES,
        seed=seed,
        confidence=CONFIDENCE,
    )
    return Interval(float(values.mean()), low, high)
