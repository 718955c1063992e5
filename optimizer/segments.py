"""Part of a network's pass: from which layer, up to which, and what is in memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """The layers from `first` up to `stop`; what lies outside of them is not run.

    `hidden` is the input of layer `first`; without it a pass begins at the token ids.
    Without `stop` it ends at the logits, else with the input of layer `stop` (one more
    than the last: the last layer's output).
    """

    first: int = 0
    hidden: Tensor | None = None
    stop: int | None = None


class Stopped(Exception):
    """Carries the hidden states out of transformers' own forward."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


WHOLE = Segment()


class Residency(Protocol):
    """Who sees to it that the weights of a stage are in memory while it runs.

    Stage 0 is the embeddings, stage i + 1 layer i, the last one norm and head.
    """

    whole: bool  # everything is in memory all the time

    def holding(self, stage: int) -> AbstractContextManager[None]:
        """Keep the weights of a stage until the context ends."""

    def on_release(self, call: Callable[[], None]) -> None:
        """Call this whenever a stage has let its weights go."""


class Resident:
    """Everything is in memory."""

    whole = True

    def holding(self, stage: int) -> AbstractContextManager[None]:
        """Nothing is to be done."""
        return nullcontext()

    def on_release(self, call: Callable[[], None]) -> None:
        """Nothing is ever let go."""


def given(segment: Segment) -> Tensor:
    """The input of a segment. Rounding works in place, so a copy but for gradients."""
    assert segment.hidden is not None
    return segment.hidden if torch.is_grad_enabled() else segment.hidden.clone()
