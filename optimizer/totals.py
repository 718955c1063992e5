"""Sums of whole tensors in one order, whatever the number of threads.

torch gives every thread a share of a whole sum, so that the last bits depend on how
many there are. Here rows are summed first, each by one thread, and then their sums,
in float64: two workers with other machines give the same bytes. It is exacter, too.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROW = 1024  # elements, where the tensor's own rows are no help
LONGEST = 16 * ROW  # half of what torch would give to several threads


def sum_of(x: Tensor) -> float:
    """Return Σ x."""
    return _sum(_rows(x).sum(-1))


def sum_of_squares(x: Tensor) -> float:
    """Return Σ x²."""
    return _sum(torch.linalg.vector_norm(_rows(x), dim=-1).double().square_())


def dots(a: Tensor, b: Tensor, parts: int = 1) -> list[float]:
    """Return Σ a·b of float32 tensors of one shape, for each of equal parts.

    Parts follow each other along the first dimension.
    """
    # numpy's einsum is one thread's, reads both once and makes no product tensor.
    sums = np.einsum("ij,ij->i", _rows(a, parts).numpy(), _rows(b, parts).numpy())
    return _by_part(sums, parts)


def dots_with(a: Tensor, shared: Tensor) -> list[float]:
    """Return Σ a·b of each matrix of `a` (parts, rows, columns) with one, float32."""
    sums = np.einsum("pij,ij->pi", a.numpy(), shared.numpy())
    return _by_part(sums, len(a))


def _by_part(sums: NDArray[np.float32], parts: int) -> list[float]:
    return sums.reshape(parts, -1).sum(axis=1, dtype=np.float64).tolist()


def _rows(x: Tensor, parts: int = 1) -> Tensor:
    """Return x as (rows, elements), without a copy where it is contiguous.

    No row has elements of two parts.
    """
    x = x.detach()
    if x.dim() > 1 and ROW // 8 <= x.shape[-1] <= LONGEST:
        return x.reshape(-1, x.shape[-1])
    flat = x.reshape(parts, -1)
    if flat.shape[1] % ROW:
        flat = torch.nn.functional.pad(flat, (0, -flat.shape[1] % ROW))
    return flat.view(-1, ROW)


def _sum(rows: Tensor) -> float:
    return float(rows.numpy().sum(dtype=np.float64))
