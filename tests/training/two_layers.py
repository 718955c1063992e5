"""A model of two layers, and what a step of it gives, by hand in float64."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Array = NDArray[np.float64]


class TwoLayers(nn.Module):
    """y = W2 tanh(W1 x); the loss is half the squared output, over the batch."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Linear(6, 5, bias=False)
        self.second = nn.Linear(5, 3, bias=False)
        for layer in (self.first, self.second):
            layer.weight.data.normal_(generator=generator)
        self.first.weight.data[:, 0] = 1e-39  # a subnormal weight: still a weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def batch(seed: int = 1, rows: int = 4) -> Tensor:
    """Inputs of which one column is zero, and one so small that bf16 underflows."""
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))
    x[:, 2] = 0
    x[:, 3] *= 1e-39
    return x


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum() / (2 * len(x))


def by_hand(model: TwoLayers, x: Tensor) -> dict[str, Array]:
    """Return the gradients of both layers: dW2 = yᵀh/n, dW1 = ((y W2)(1-h²))ᵀx/n."""
    w1, w2, rows = (
        t.detach().numpy().astype(np.float64)
        for t in (model.first.weight, model.second.weight, x)
    )
    h = np.tanh(rows @ w1.T)
    y = h @ w2.T
    into = (y @ w2) * (1 - h**2)
    return {"first": into.T @ rows / len(rows), "second": y.T @ h / len(rows)}


def by_hand_norm(gradients: dict[str, Array]) -> float:
    return float(np.sqrt(sum((g**2).sum() for g in gradients.values())))
