"""Every sequence through one stage, then every one through the next.

So the weights of a stage are needed once, however many sequences there are, and a
model larger than memory streams past. What passes between the stages is kept here.
"""

import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO

import numpy as np
import torch
from torch import Tensor

from optimizer import memory
from optimizer.execute import Reference
from optimizer.model import LoadedModel

Key = tuple[int, int]  # stage, sequence
Told = Callable[[int, int], None]  # done, planned


def silent(done: int, planned: int) -> None:
    """Tell nobody."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Activations:
    """float32 tensors by key: in memory up to a budget, then in one nameless file.

    The file has no name, so nothing of it is left behind, whatever ends the process.
    """

    budget_bytes: int = field(default_factory=memory.activations_bytes)
    _held: dict[Key, Tensor] = field(default_factory=dict)
    _bytes: int = 0
    _file: IO[bytes] | None = None
    _end: int = 0
    _places: dict[Key, tuple[int, torch.Size]] = field(default_factory=dict)
    _free: dict[int, list[int]] = field(default_factory=dict)  # offsets, by size

    def __contains__(self, key: Key) -> bool:
        """Whether the tensor is kept."""
        return key in self._held or key in self._places

    def put(self, key: Key, x: Tensor) -> None:
        """Keep a tensor; what was kept under the key before is replaced."""
        self.drop(key)
        size = x.numel() * 4
        if self._bytes + size <= self.budget_bytes:
            self._held[key] = x.detach().float()
            self._bytes += size
        else:
            self._write(key, x.detach().float().contiguous())

    def get(self, key: Key) -> Tensor:
        """Return the tensor. KeyError where nothing is kept."""
        if key in self._held:
            return self._held[key]
        offset, shape = self._places[key]
        assert self._file is not None
        read = os.pread(self._file.fileno(), shape.numel() * 4, offset)
        return torch.from_numpy(np.frombuffer(bytearray(read), np.float32)).view(shape)

    def drop(self, key: Key) -> None:
        """Forget a tensor, if it is kept."""
        held = self._held.pop(key, None)
        if held is not None:
            self._bytes -= held.numel() * 4
        place = self._places.pop(key, None)
        if place is not None:
            self._free.setdefault(place[1].numel(), []).append(place[0])

    def _write(self, key: Key, x: Tensor) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="precision-")  # noqa: SIM115
            weakref.finalize(self, self._file.close)
        data = memoryview(x.numpy().tobytes())
        free = self._free.get(x.numel())
        start = free.pop() if free else self._end
        written = 0
        while written < len(data):
            written += os.pwrite(self._file.fileno(), data[written:], start + written)
        self._places[key] = (start, x.shape)
        self._end = max(self._end, start + len(data))


@torch.no_grad()
def walk(
    model: LoadedModel,
    sequences: Sequence[Tensor],
    executor: Reference,
    *,
    kept: Activations,
    before: Callable[[int], Tensor | None] = lambda index: None,
    after: Callable[[int, int, Tensor], None] = lambda stage, index, out: None,
    keep_all: bool = True,
    last: bool = True,
    names: Sequence[int] | None = None,
    progress: Told = silent,
) -> None:
    """Run all `sequences` of ids (batch, tokens), stage by stage.

    The input of stage s ≥ 1 of sequence i is kept under (s, i), for every stage or,
    without `keep_all`, only until it was used; `names` has other numbers for the
    sequences. Without `last` the last stage is not run. `before` is told which sequence runs
    next and returns its attention mask; `after` gets every stage's output, the
    logits (batch, tokens, vocab) last.
    """
    stages = model.stages if last else model.stages - 1
    numbers = range(len(sequences)) if names is None else names
    done, planned = 0, stages * len(sequences)
    for stage in range(stages):
        with model.residency.holding(stage):
            for index, ids in zip(numbers, sequences, strict=True):
                mask = before(index)
                hidden = kept.get((stage, index)) if stage else None
                out = model.stage(stage, ids, hidden, executor, mask)
                after(stage, index, out)
                if stage + 1 < model.stages:
                    kept.put((stage + 1, index), out)
                if not keep_all:
                    kept.drop((stage, index))
                progress(done := done + 1, planned)
