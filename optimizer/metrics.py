"""How far a tensor or a model moved.

Everything is computed from float32 logits and summed in float64: a bf16 sum of token
losses stops growing after a few hundred tokens.
"""

import math

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import cross_entropy

from optimizer.errors import DatasetError


def sqnr_db(x: Tensor, x_hat: Tensor) -> float:
    """Signal-to-quantization-noise ratio: 10 log10(Σx² / Σ(x - x̂)²), in dB.

    inf where the two are equal, -inf where only the signal is zero.
    """
    signal = float(vector_norm(x, dtype=torch.float64))
    noise = float(vector_norm(x - x_hat, dtype=torch.float64))
    if noise == 0:
        return math.inf
    return 20 * math.log10(signal / noise) if signal else -math.inf


def token_nll(logits: Tensor, tokens: Tensor) -> Tensor:
    """Negative log-likelihood of each next token, in nats, float32.

    (batch, length, vocab), (batch, length) -> (batch, length - 1): the last position
    predicts nothing, and the first token is not predicted.
    """
    predictions = logits[:, :-1].float().transpose(1, 2)  # cross_entropy's order
    return cross_entropy(predictions, tokens[:, 1:], reduction="none")


def perplexity(nll: Tensor, scored: Tensor) -> float:
    """exp(mean nll) over the tokens where `scored` is true; same shapes.

    Every scored token weighs the same, whatever sequence it is in; what padding holds,
    even NaN, is never read. Raises DatasetError if nothing is scored.
    """
    chosen = nll[scored].double()
    if len(chosen) == 0:
        raise DatasetError("perplexity of no tokens: every position is padding")
    return math.exp(float(chosen.mean()))


def top1_agrees(logits_ref: Tensor, logits: Tensor) -> Tensor:
    """Whether both have the same most likely token: (..., vocab) twice -> (...)."""
    return logits_ref.argmax(dim=-1) == logits.argmax(dim=-1)


def bootstrap_interval(
    values: ArrayLike,
    block: int,
    samples: int,
    seed: int,
    confidence: float = 0.95,
) -> tuple[float, float]:
    """Percentile interval of the mean of `values`, one per token in text order.

    Neighboring tokens are not independent, so whole blocks of `block` consecutive
    tokens are drawn, wrapping around at the end (circular block bootstrap).
    """
    sums = _circular_block_sums(np.asarray(values, dtype=np.float64), block)
    per_sample = -(-len(sums) // block)
    starts = np.random.default_rng(seed).integers(len(sums), size=(samples, per_sample))
    means = sums[starts].mean(axis=1) / block
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def _circular_block_sums(
    values: NDArray[np.float64], block: int
) -> NDArray[np.float64]:
    """Sum of the `block` values from each start on: (n,) -> (n,)."""
    wrapped = np.resize(values, len(values) + block)
    cumulated = np.concatenate([[0.0], np.cumsum(wrapped)])
    return cumulated[block : block + len(values)] - cumulated[: len(values)]


def logits_kl_nats(
    reference: Tensor, logits: Tensor, p: Tensor | None = None
) -> Tensor:
    """KL(reference ‖ ours) of each token from logits, in nats: (..., vocab) -> (...).

    `p` is the reference's softmax, where the caller has it.
    """
    return kl_and_log_sums(reference, logits, p)[0]


def kl_and_log_sums(
    reference: Tensor, logits: Tensor, p: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return `logits_kl_nats`, and how much larger log Σ e^logits is than theirs.

    With d the difference of the logits less its mean under p, KL = log Σ p e^-d, and
    Σ p (e^-d - 1 + d) has no negative term: a KL of 1e-8 keeps its digits in float32,
    where the difference of two log-softmaxes would be noise. The logarithms of the
    sums differ by KL and that mean.
    """
    p = reference.softmax(dim=-1) if p is None else p
    d = logits - reference  # from here on -d, in place: a vocabulary is large
    mean = (p.unsqueeze(-2) @ d.unsqueeze(-1)).squeeze(-1)
    d -= mean
    excess = torch.expm1(d).sub_(d)
    kl = torch.log1p((p.unsqueeze(-2) @ excess.unsqueeze(-1)).flatten(-3))
    return kl, kl + mean.squeeze(-1)
