"""Parameters that processes share, as FSDP cuts them up: each holds a part of the rows.

What is counted of the parts is added up, so that every process knows what one process
with the whole tensor would: no tensor is gathered. torch marks the parts as DTensors.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor


def local(x: Tensor) -> Tensor:
    """Return this process's part of a tensor; the tensor where nobody shares it."""
    part: Tensor = x.to_local() if _is_shared(x) else x  # type: ignore[attr-defined]
    return part


def added_up(rows: Tensor, of: Sequence[Tensor]) -> Tensor:
    """Return counts (tensors, figures) of parts as those of the whole tensors.

    Every process calls it with as many rows. Replicas are equal, and not added.
    """
    members: dict[Any, list[int]] = {}
    for number, x in enumerate(of):
        for group in _groups(x):
            members.setdefault(group, []).append(number)
    for group, numbers in members.items():
        part = rows[numbers]
        dist.all_reduce(part, group=group)
        rows[numbers] = part
    return rows


def _is_shared(x: Tensor) -> bool:
    # Loading DTensor takes a second; where nobody loaded it, there are none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def _groups(x: Any) -> Iterator[Any]:
    """Yield the groups of processes over which a tensor is cut up."""
    if not _is_shared(x):
        return
    for dimension, placement in enumerate(x.placements):
        if placement.is_shard():
            yield x.device_mesh.get_group(dimension)
