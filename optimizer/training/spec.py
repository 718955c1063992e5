"""How a probe trains: what a caller asked for, checked, without torch."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any

from optimizer.advice import LossScaling
from optimizer.errors import SpecError
from optimizer.training.candidates import (
    CANDIDATES,
    Arithmetic,
    Candidate,
    Scaling,
    without_masters,
)

TASKS = ("pretrain", "finetune", "lora")
OPTIMIZERS = ("adam", "sgd", "sgd_momentum")  # adam: AdamW, torch's defaults
STEPS = (4, 5000)  # a probe of some hundred steps sees what a long run will
MAX_RATE = 10.0
MAX_BATCH = 1024  # sequences of one step, accumulated ones included


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The precision that the caller means to train in: one more candidate."""

    arithmetic: str = "fp16"  # fp32, bf16, fp16, fp8
    masters: bool = True
    loss_scaling: str = "dynamic"  # dynamic, static, none; fp16 alone is scaled
    initial_scale: float = 2.0**16
    scaling: str = "delayed"  # of FP8 tensors: delayed, current

    def __post_init__(self) -> None:
        for name, known in (
            ("arithmetic", tuple(Arithmetic)),
            ("loss_scaling", ("dynamic", "static", "none")),
            ("scaling", tuple(Scaling)),
        ):
            value = getattr(self, name)
            if value not in known:
                raise SpecError(
                    f"planned.{name} is {value!r}; there are: {', '.join(known)}"
                )
        if not (math.isfinite(self.initial_scale) and self.initial_scale > 0):
            raise SpecError("planned.initial_scale must be a finite number > 0")
        self.candidate()

    def candidate(self) -> Candidate:
        """Return it as the candidate `planned`."""
        arithmetic = Arithmetic(self.arithmetic)
        scaled = arithmetic is Arithmetic.FP16 and self.masters
        scaled = scaled and self.loss_scaling != "none"
        fp8 = arithmetic is Arithmetic.FP8
        return Candidate(
            name="planned",
            arithmetic=arithmetic,
            masters=self.masters,
            loss_scaling=LossScaling(self.initial_scale) if scaled else None,
            dynamic=self.loss_scaling != "static",
            scaling=Scaling(self.scaling) if fp8 else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """One training as it is probed; `TASKS_OF` has what is usual for a task."""

    optimizer: str = "adam"
    learning_rate: float = 3e-4
    warmup_steps: int = 10  # the rate rises linearly over them, and stays
    weight_decay: float = 0.0
    clip: float | None = 1.0  # largest norm of all gradients together; None: any
    batch_size: int = 8  # sequences that go through at once
    accumulation: int = 1  # of them in a step
    sequence_tokens: int = 128
    steps: int = 100
    lora_rank: int = 8
    candidates: tuple[str, ...] = tuple(CANDIDATES)
    without_masters: bool = False  # try each candidate without master weights, too
    planned: Planned | None = None

    def __post_init__(self) -> None:
        _known("optimizer", (self.optimizer,), OPTIMIZERS)
        _known("candidates", self.candidates, tuple(CANDIDATES))
        low, high = STEPS
        if not low <= self.steps <= high:
            raise SpecError(
                f"steps is {self.steps}; a probe takes {low} to {high}, and some "
                "hundred show what a long run will do"
            )
        rate = self.learning_rate
        if not (math.isfinite(rate) and 0 < rate <= MAX_RATE):
            raise SpecError(
                f"learning_rate is {rate:g}; it must be over 0 and at most {MAX_RATE:g}"
            )
        if self.warmup_steps < 0:
            raise SpecError(
                f"warmup_steps is {self.warmup_steps}; it must be 0 or more"
            )
        if self.clip is not None and not (math.isfinite(self.clip) and self.clip > 0):
            raise SpecError(f"clip is {self.clip:g}; it must be a number > 0, or null")
        if not 1 <= self.step_sequences <= MAX_BATCH:
            raise SpecError(
                f"batch_size × accumulation is {self.step_sequences}; it must be 1 to "
                f"{MAX_BATCH}"
            )

    @property
    def step_sequences(self) -> int:
        """Sequences of one step."""
        return self.batch_size * self.accumulation

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step >= self.warmup_steps:
            return self.learning_rate
        return self.learning_rate * (step + 1) / self.warmup_steps

    def tried(self) -> tuple[Candidate, ...]:
        """Return the candidates, the planned one first."""
        named = [CANDIDATES[name] for name in self.candidates]
        if self.without_masters:
            named += [without_masters(candidate) for candidate in named]
        planned = [self.planned.candidate()] if self.planned else []
        return (*planned, *named)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON, lists for tuples."""
        return {**asdict(self), "candidates": list(self.candidates)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "TrainingSpec":
        """Inverse of `to_json`; keys that a later version added are ignored."""
        known = {f.name for f in fields(cls)}
        kept = {k: v for k, v in data.items() if k in known}
        planned = kept.get("planned")
        return cls(
            **{
                **kept,
                "candidates": tuple(data["candidates"]),
                "planned": Planned(**planned) if planned else None,
            }
        )


def _known(name: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    unknown = [value for value in given if value not in known]
    if unknown:
        raise SpecError(f"{name}: no {unknown[0]!r}; there are: {', '.join(known)}")


TASKS_OF: Mapping[str, TrainingSpec] = MappingProxyType(
    {
        "pretrain": TrainingSpec(learning_rate=3e-4, weight_decay=0.1),
        "finetune": TrainingSpec(learning_rate=2e-5),
        "lora": TrainingSpec(learning_rate=2e-4),
    }
)
"""What is usual for a task, where the caller says nothing."""
