"""Adapters of low rank at every matrix of a model's layers (Hu et al. 2021).

    y = W x + (2 · B A) x        W frozen; A (rank × in) random, B (out × rank) zero

Named as PEFT names them, so that what a probe says of `q_proj.lora_A` can be found.
"""

import re

import torch
from torch import Tensor, nn

from optimizer.errors import SpecError
from optimizer.training.gemms import Matrix, matrices

SCALING = 2.0  # alpha / rank, as alpha is usually twice the rank
_IN_A_LAYER = re.compile(r"\.\d+\.")


class Adapted(nn.Module):
    """A frozen matrix with an adapter beside it."""

    def __init__(self, matrix: Matrix, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = matrix.weight.shape
        self.base_layer = matrix.module
        self.lora_A = nn.Linear(columns, rank, bias=False)
        self.lora_B = nn.Linear(rank, rows, bias=False)
        with torch.no_grad():
            # Kaiming's bound of a linear layer, as PEFT draws it.
            bound = columns**-0.5
            self.lora_A.weight.uniform_(-bound, bound, generator=generator)
            self.lora_B.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Add what the adapter has learned."""
        base: Tensor = self.base_layer(x)
        more: Tensor = self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype)))
        return base + SCALING * more.to(base.dtype)


def adapt(network: nn.Module, rank: int, seed: int) -> None:
    """Freeze `network`, and put an adapter at every matrix of its layers.

    Raises SpecError where it has none, or a rank is no less than a matrix's own.
    """
    network.requires_grad_(False)
    found = [m for m in matrices(network) if _IN_A_LAYER.search(f".{m.name}.")]
    if not found:
        raise SpecError("the model has no matrix in its layers that takes an adapter")
    smallest = min(min(m.weight.shape) for m in found)
    if rank >= smallest:
        raise SpecError(
            f"lora_rank is {rank}; the model's smallest matrix has rank {smallest}, and "
            "an adapter must have less"
        )
    generator = torch.Generator().manual_seed(seed)
    for matrix in found:
        above, _, name = matrix.name.rpartition(".")
        setattr(network.get_submodule(above), name, Adapted(matrix, rank, generator))
