"""Which sequences each step of a run sees: the same for every run, or in another order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from optimizer.errors import DatasetError

FIRST, SECOND = 0, 1  # the orders of the two runs that give the noise floor


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """Samples of equal shape, and which of them make up each step."""

    samples: Tensor  # (samples, ...)
    steps: NDArray[np.int64]  # (steps, samples of a step): numbers of samples
    epochs: float  # how often the data is gone through

    def __len__(self) -> int:
        """How many steps there are."""
        return len(self.steps)

    def __getitem__(self, step: int) -> Tensor:
        """Return the samples of a step."""
        return self.samples[torch.from_numpy(self.steps[step])]


def batches(
    samples: Tensor | Sequence[Tensor], size: int, steps: int, seed: int, order: int
) -> Batches:
    """Deal samples into `steps` batches of `size`, epoch after epoch if need be.

    Every order has the same samples equally often. Raises DatasetError, saying how many
    there are, where they do not fill one batch.
    """
    stacked = samples if isinstance(samples, Tensor) else _stacked(samples)
    count = len(stacked)
    if count < size:
        raise DatasetError(
            f"the data has {count} whole sequences, and one step takes {size} "
            "(batch_size × accumulation): give more text, shorter sequences, or a "
            "smaller batch"
        )
    rng = np.random.default_rng(seed)
    epochs = -(-steps * size // count)
    dealt = np.concatenate([rng.permutation(count) for _ in range(epochs)])
    dealt = dealt[: steps * size]
    if order != FIRST:
        dealt = np.random.default_rng([seed, order]).permutation(dealt)
    return Batches(stacked, dealt.reshape(steps, size), steps * size / count)


def _stacked(samples: Sequence[Tensor]) -> Tensor:
    """Return the samples of full length as one tensor."""
    if not samples:
        raise DatasetError("the data has no whole sequence: give more text")
    longest = max(sample.numel() for sample in samples)
    whole = [sample.reshape(-1) for sample in samples if sample.numel() == longest]
    return torch.stack(whole)


def to_json(found: Batches) -> dict[str, Any]:
    """Return what was trained on, in numbers."""
    return {
        "sequences": len(found.samples),
        "sequence_tokens": int(found.samples[0].numel()),
        "epochs": found.epochs,
    }
