"""One run of a probe: the steps of one candidate, and what they looked like.

Built so that two runs differ in precision alone: the same start, the same data in the
same order, the same optimizer. torch's own autocast and GradScaler compute; a step is

    micro-batches: loss × scale ▸ backward      (each a share of the step's mean)
    unscale ▸ norms ▸ clip ▸ step               (not taken where a gradient is inf or NaN)

The loss of a step is the mean over all its predictions, however they are cut into
micro-batches or spread over processes. So every gradient, and every count of what is in
it, is that of the whole step.
"""

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from optimizer.errors import SpecError
from optimizer.training import processes, updates
from optimizer.training.candidates import Arithmetic, Candidate
from optimizer.training.exponents import SeenBy
from optimizer.training.gemms import Recorder, Routed, route
from optimizer.training.spec import TrainingSpec
from optimizer.training.train_data import Batches
from optimizer.training.updates import Update

AUTOCAST = {Arithmetic.BF16: torch.bfloat16, Arithmetic.FP16: torch.float16}
LOOKS = 8  # steps of a run that are looked into, the first and the last among them
MOST_SKIPS = 30  # tries of a step: from 2^16 to 2^-14, where no scale helps


class Loss(Protocol):
    """What is trained for."""

    def __call__(self, network: nn.Module, samples: Tensor) -> Tensor:
        """Return the sum of the losses of all predictions: a scalar."""
        ...

    def predictions(self, samples: Tensor) -> int:
        """Return how many predictions samples have."""
        ...


Told = Callable[[int, int], None]
"""Hears how many steps are done, of how many."""


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """What is trained, and on what: the same for every run."""

    network: nn.Module  # in fp32; copied by each run
    loss: Loss
    batches: Batches
    held_out: Sequence[Tensor] = ()  # samples that no run trains on

    def trained(self) -> list[str]:
        """Return the parameters that are trained. Raises SpecError where none is."""
        names = [n for n, p in self.network.named_parameters() if p.requires_grad]
        if not names:
            count = sum(1 for _ in self.network.parameters())
            raise SpecError(
                f"all {count} parameters of the model are frozen: nothing would be "
                "trained. Let some require gradients, or train adapters (lora)"
            )
        return names


@dataclass(slots=True)
class Figures:
    """What a run came to; norms and losses are of every step, the rest of some."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)  # of the loss, before the step
    skipped: list[tuple[int, float]] = field(default_factory=list)  # step, scale
    norms: dict[str, list[float]] = field(default_factory=dict)  # by parameter
    seen: SeenBy = field(default_factory=dict)
    updates: dict[str, Update] = field(default_factory=dict)  # by parameter
    moved: dict[str, float] = field(default_factory=dict)  # ‖w - w at first‖
    held_out: list[float] = field(default_factory=list)  # loss of each sample
    stopped: str | None = None  # why it ended before its last step


class Run:
    """A candidate's run over a problem, one step at a time."""

    def __init__(
        self,
        problem: Problem,
        how: TrainingSpec,
        candidate: Candidate,
        processes_: "processes.Processes | None" = None,
    ) -> None:
        self.problem, self.how, self.candidate = problem, how, candidate
        self.processes = processes_ or processes.ALONE
        self.figures = Figures()
        self.done = 0
        self.network = copy.deepcopy(problem.network)
        names = problem.trained()
        if not candidate.masters:
            self.network.to(_dtype(candidate))
        self.trained = {n: self.network.get_parameter(n) for n in names}
        self.start = {n: p.detach().clone() for n, p in self.trained.items()}
        self.recorder = Recorder(candidate)
        self.routed: Routed = route(self.network, candidate, self.recorder)
        self.optimizer = _optimizer(how, list(self.trained.values()))
        self.scaler = _scaler(candidate, self._device)
        self.outer = self.processes.wrap(self.network)

    @property
    def _device(self) -> str:
        return next(iter(self.trained.values())).device.type

    @property
    def finished(self) -> bool:
        """Whether the last step is done, or none can follow."""
        return self.done >= self.how.steps or self.figures.stopped is not None

    def run(self, until: int, told: Told = lambda done, planned: None) -> None:
        """Do the steps up to `until`, and after the last one measure the held-out loss."""
        while self.done < until and not self.finished:
            self.step()
            told(self.done, self.how.steps)
        if self.finished and not self.figures.moved:
            self._finish()

    # -- a step

    def step(self) -> None:
        """Do one step. Where a gradient overflows, try it again with a smaller scale.

        A training would go on with the next batch. Here it is the same one, so that
        runs stay comparable step by step; the tries are in `skipped`.
        """
        step = self.done
        for group in self.optimizer.param_groups:
            group["lr"] = self.how.rate(step)
        looked = step in looked_at(self.how.steps)
        weights = looked and self._weights_count(step)
        for _ in range(MOST_SKIPS):
            loss, scale = self._try(looked, weights)
            if self._finite():
                self._take(step, loss, scale, looked)
                return
            if self.scaler is None:
                break
            self.figures.skipped.append((step, scale))
            self._apply()  # which takes no step, and lowers the scale
        self._try(looked=True, weights=True)  # to see where it happens
        self.recorder.keep()
        self.figures.stopped = self._why(step, loss)

    def _weights_count(self, step: int) -> bool:
        """Whether weights are looked at in a step that is: in FP8, and at both ends.

        They are as many values as their gradients, and hardly change from step to step;
        under an FP8 scale that is made of earlier steps even that counts.
        """
        return self.candidate.scaling is not None or step in (0, self.how.steps - 1)

    def _try(self, looked: bool, weights: bool) -> tuple[float, float]:
        """Run the step's samples forth and back. Return its loss, and the loss's scale."""
        self.recorder.begin(looked)
        scale = self.scaler.get_scale() if self.scaler else 1.0
        loss = self._backward(self.problem.batches[self.done])
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        if self.processes.first:
            self.routed.record_gradients(self.recorder, scale)
            if weights:
                self.routed.record_weights(self.recorder)
        return loss, scale

    def _finite(self) -> bool:
        gradients = [p.grad for p in self.trained.values() if p.grad is not None]
        return all(bool(g.isfinite().all()) for g in gradients)

    def _take(self, step: int, loss: float, scale: float, looked: bool) -> None:
        """Update the weights, and note what the step was like."""
        self.figures.losses.append(loss)
        self.figures.scales.append(scale)
        for name, norm in self._norms().items():
            self.figures.norms.setdefault(name, []).append(norm)
        before = updates.copied(self.trained) if looked else {}
        self._apply()
        if looked:
            self.recorder.keep()
            how = (self.how.rate(step), self.candidate)
            updates.note(self.figures.updates, self.trained, before, *how)
        self.routed.roll()
        self.done += 1

    def _norms(self) -> dict[str, float]:
        """Return the norm of every gradient, unscaled and not clipped yet."""
        return {
            name: float(p.grad.float().norm()) if p.grad is not None else 0.0
            for name, p in self.trained.items()
        }

    def _apply(self) -> None:
        if self.how.clip is not None:
            nn.utils.clip_grad_norm_(self.trained.values(), self.how.clip)
        if self.scaler is None:
            self.optimizer.step()
            return
        self.scaler.step(self.optimizer)
        self.scaler.update(None if self.candidate.dynamic else self.scaler.get_scale())

    def _why(self, step: int, loss: float) -> str:
        """Say why no further step can be taken."""
        bad = [n for n, p in self.trained.items() if not bool(p.isfinite().all())]
        if bad:
            said = f"the update before step {step} left {bad[0]} with inf or NaN"
            return said + self._divided_by_zero()
        if self.scaler is None:
            what = "a gradient" if math.isfinite(loss) else "the loss"
            return f"{what} of step {step} is inf or NaN"
        return f"step {step} overflows at every scale of {MOST_SKIPS} tried"

    def _divided_by_zero(self) -> str:
        """Say so where Adam's eps is nothing in the format that it is added in."""
        eps, fmt = self.optimizer.defaults.get("eps"), self.candidate.storage
        if eps is None or eps > fmt.smallest_subnormal / 2:
            return ""
        return f" (Adam adds eps = {eps:g} to what it divides by: 0 in {fmt.name})"

    def _backward(self, samples: Tensor) -> float:
        """Add up the gradients of a step, and return its loss."""
        self.optimizer.zero_grad(set_to_none=True)
        mine = self.processes.share(samples)
        parts = mine.split(self.how.batch_size)
        total, predictions = 0.0, self.problem.loss.predictions(samples)
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            with self.processes.adding_up(self.outer, last):
                with self._autocast():
                    lost = self.problem.loss(self.outer, part)
                lost = lost.float() / predictions
                total += float(lost.detach())
                (self.scaler.scale(lost) if self.scaler else lost).backward()
        return self.processes.sum(total)

    def _autocast(self) -> AbstractContextManager[object]:
        """Compute as the candidate does what is in no matrix. Alone 16 bits need none."""
        dtype = AUTOCAST.get(self.candidate.base)
        if dtype is None or not self.candidate.masters:
            return nullcontext()
        return torch.autocast(self._device, dtype=dtype)

    # -- the end

    def _finish(self) -> None:
        for name, parameter in self.trained.items():
            moved = parameter.detach().double() - self.start[name].double()
            self.figures.moved[name] = float(moved.norm())
        self.figures.seen = self.processes.together(self.recorder.seen)
        self.figures.held_out = self._held_out()

    @torch.no_grad()
    def _held_out(self) -> list[float]:
        """Return the loss of each held-out sample, run in fp32 from the final weights."""
        if not self.problem.held_out:
            return []
        plain = copy.deepcopy(self.problem.network)
        for name, parameter in self.trained.items():
            plain.get_parameter(name).copy_(parameter)
        found = []
        for sample in self.problem.held_out:
            lost = self.problem.loss(plain, sample)
            found.append(float(lost) / self.problem.loss.predictions(sample))
        return found


def looked_at(steps: int) -> frozenset[int]:
    """Return the steps that are looked into: evenly spread, both ends included."""
    count = min(LOOKS, steps)
    if count == 1:
        return frozenset({0})
    return frozenset(round(i * (steps - 1) / (count - 1)) for i in range(count))


def _dtype(candidate: Candidate) -> torch.dtype:
    return torch.float16 if candidate.storage.name == "fp16" else torch.bfloat16


def _optimizer(how: TrainingSpec, trained: list[nn.Parameter]) -> torch.optim.Optimizer:
    rate, decay = how.learning_rate, how.weight_decay
    if how.optimizer == "adam":
        return torch.optim.AdamW(trained, lr=rate, weight_decay=decay)
    momentum = 0.9 if how.optimizer == "sgd_momentum" else 0.0
    return torch.optim.SGD(trained, lr=rate, weight_decay=decay, momentum=momentum)


def _scaler(candidate: Candidate, device: str) -> "torch.amp.GradScaler | None":
    how = candidate.loss_scaling
    if how is None:
        return None
    return torch.amp.GradScaler(
        device,
        init_scale=how.initial,
        growth_factor=how.growth,
        backoff_factor=how.backoff,
        growth_interval=how.growth_interval,
    )


@dataclass(frozen=True, slots=True)
class NextToken:
    """The loss of a language model on ids (samples, tokens): cross entropy in fp32."""

    def __call__(self, network: nn.Module, samples: Tensor) -> Tensor:
        """Return the summed loss of every next token."""
        out: Any = network(samples)
        logits = getattr(out, "logits", out)[:, :-1].float()
        return nn.functional.cross_entropy(
            logits.flatten(0, -2), samples[:, 1:].flatten(), reduction="sum"
        )

    def predictions(self, samples: Tensor) -> int:
        """Return how many next tokens there are."""
        return samples[:, 1:].numel()
