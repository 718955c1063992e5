"""Several processes that share each step of a run: DistributedDataParallel, summing.

Each process has its share of a step's samples. torch's default divides the summed
gradients by the number of processes; here the loss is a share of the whole step's mean
already, so they are added up: gradients then are those of one process, to the last
rounding of a sum in another order.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from optimizer.errors import SpecError
from optimizer.training.exponents import Seen, SeenBy


@dataclass(frozen=True, slots=True)
class Processes:
    """Which process this is, of how many. Alone, nothing is wrapped or sent."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether what all have in common is this process's to tell."""
        return self.rank == 0

    def wrap(self, network: nn.Module) -> nn.Module:
        """Return the network whose gradients are added up over the processes."""
        if self.count == 1:
            return network
        wrapped = DistributedDataParallel(network)
        wrapped.register_comm_hook(None, _added)
        return wrapped

    def share(self, samples: Tensor) -> Tensor:
        """Return this process's samples of a step. Raises SpecError for uneven shares."""
        if len(samples) % self.count:
            raise SpecError(
                f"{len(samples)} sequences of a step cannot be shared evenly by "
                f"{self.count} processes"
            )
        each = len(samples) // self.count
        return samples[self.rank * each : (self.rank + 1) * each]

    def adding_up(
        self, network: nn.Module, last: bool
    ) -> AbstractContextManager[object]:
        """Send gradients with the last micro-batch alone."""
        if isinstance(network, DistributedDataParallel) and not last:
            return network.no_sync()
        return nullcontext()

    def sum(self, value: float) -> float:
        """Return the sum of a figure over the processes."""
        if self.count == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total)

    def together(self, seen: SeenBy) -> SeenBy:
        """Return what all processes saw: on each of them."""
        if self.count == 1:
            return seen
        every: list[Mapping[str, Any]] = [{}] * self.count
        dist.all_gather_object(every, _plain(seen))
        found: SeenBy = {}
        for one in every:
            for matrix, roles in one.items():
                for role, data in roles.items():
                    known = found.setdefault(matrix, {})
                    known.setdefault(role, Seen()).merge(Seen.from_json(data))
        return found


ALONE = Processes()


def current() -> Processes:
    """Return this process's place among those of torch's default group."""
    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
    return Processes(dist.get_rank(), dist.get_world_size())


def _plain(seen: SeenBy) -> dict[str, Any]:
    return {m: {r: s.to_json() for r, s in roles.items()} for m, roles in seen.items()}


def _added(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Add a bucket of gradients up, without dividing by the number of processes."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
