"""Labels drawn from the model itself, and the gradients that they send back.

With ŷ drawn from p the gradient of -log p(ŷ) in the logits, p - onehot(ŷ), has the
covariance diag(p) - p pᵀ: the curvature of KL at the reference (Fisher information).
"""

import torch
from torch import Tensor


def draw(p: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """Return `samples` labels for each row of probabilities: (tokens, samples).

    One look-up in the cumulative sum: `torch.multinomial` draws a number for every
    label of the vocabulary, in one thread.
    """
    reached = p.cumsum(dim=-1)
    points = torch.rand(len(p), samples, generator=generator) * reached[:, -1:]
    found = torch.searchsorted(reached, points, right=True)
    return found.clamp_(max=p.shape[-1] - 1)  # a point rounded up to the very end


@torch.no_grad()
def label_gradients(
    logits: Tensor, samples: int, generator: torch.Generator
) -> list[Tensor]:
    """Return the gradient of Σ -log p(ŷ) in `logits` (tokens, vocab), for each draw."""
    p = logits.softmax(dim=-1)
    labels = draw(p, samples, generator)
    rows = torch.arange(len(p))
    gradients = [p.clone() for _ in range(samples - 1)] + [p]
    for k, gradient in enumerate(gradients):
        gradient[rows, labels[:, k]] -= 1.0
    return gradients
