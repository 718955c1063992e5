"""Sums of whole tensors in one order, whatever the number of threads.

torch gives every thread a share of a whole sum, so that the last bits depend on how
many there are. Here rows are summed first, each by one thread, and then their sums,
in float64: two workers with other machines give the same bytes. It is exacter, too.
"""

import numpy as np
import torch
from torch import Tensor

ROW = 1024  # elements, where the tensor's own rows are no help
LONGEST = 16 * ROW  # half of what torch would give to several threads


def sum_of(x: Tensor) -> float:
    """Return Σ x."""
    return _sum(_rows(x).sum(-1))


def sum_of_squares(x: Tensor) -> float:
    """Return Σ x²."""
    return _sum(torch.linalg.vector_norm(_rows(x), dim=-1).double().square_())


def sums_of_squares(x: Tensor) -> list[float]:
    """Return Σ x² of each of the matrices x (parts, rows, columns).

    A row's norm is rounded to the format of x.
    """
    norms = torch.linalg.vector_norm(x, dim=-1).double()
    return norms.square_().numpy().sum(axis=-1).tolist()


def _rows(x: Tensor) -> Tensor:
    """Return x as (rows, elements), without a copy where it is contiguous."""
    x = x.detach()
    if x.dim() > 1 and ROW // 8 <= x.shape[-1] <= LONGEST:
        return x.reshape(-1, x.shape[-1])
    flat = x.reshape(-1)
    if len(flat) % ROW:
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % ROW))
    return flat.view(-1, ROW)


def _sum(rows: Tensor) -> float:
    return float(rows.numpy().sum(dtype=np.float64))
