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


def dot(a: Tensor, b: Tensor) -> float:
    """Return Σ a·b of two float32 tensors of one shape."""
    # numpy's einsum is one thread's, reads both once and makes no product tensor.
    sums = np.einsum("ij,ij->i", _rows(a).numpy(), _rows(b).numpy())
    return float(sums.sum(dtype=np.float64))


def _rows(x: Tensor) -> Tensor:
    """Return x as (rows, elements), without a copy where it is contiguous."""
    x = x.detach()
    if x.dim() > 1 and ROW // 8 <= x.shape[-1] <= LONGEST:
        return x.reshape(-1, x.shape[-1])
    flat = x.reshape(-1)
    if flat.numel() % ROW:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % ROW))
    return flat.view(-1, ROW)


def _sum(rows: Tensor) -> float:
    return float(rows.numpy().sum(dtype=np.float64))
