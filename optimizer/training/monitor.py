"""HealthMonitor: what a training run tells about its precision while it runs.

    monitor = HealthMonitor(model, optimizer, scaler=scaler, precision="fp16")
    for batch in batches:
        scaler.scale(loss_of(batch)).backward()  # as often as gradients accumulate
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        monitor.step(loss, norm)  # before the gradients are set to zero
        optimizer.zero_grad()

Gradients are looked at as the optimizer gets them: accumulated, averaged over
processes, unscaled, clipped. The norm that `clip_grad_norm_` returns is the one before
clipping; where it is not given, it is that of what the optimizer got. A step that the
scaler left out never reaches the optimizer, and that is how it is counted.

Every `every` steps, and once after a step that went wrong, a step is sampled: gradients,
outputs, FP8 values and updates of every layer. Other steps cost a few counters. Of
several processes only the first rings, logs and calls back.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optimizer.errors import SpecError
from optimizer.training.health import (
    Alarm,
    LayerReading,
    Reading,
    Thresholds,
    Watch,
)
from optimizer.training.metrics import (
    Look,
    Watched,
    as_float,
    layer_parameters,
    learning_rates,
    looks,
    total_norm,
)
from optimizer.training.outputs import OutputWatch

EVERY = 50
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
Log = Callable[[Mapping[str, Any]], None]
Ring = Callable[[Alarm], None]


class HealthMonitor:
    """Watches one model and its optimizer. Call `step` once for each optimizer step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        precision: str,
        scaler: torch.amp.GradScaler | None = None,
        every: int = EVERY,
        thresholds: Thresholds | None = None,
        on_alarm: Iterable[Ring] = (),
        log: Log | None = None,
        outputs: bool = True,
    ) -> None:
        """Hook into the optimizer; `outputs` hooks the layers of sampled steps too.

        `log` gets a record of every step, which makes each step wait for its loss.
        Raises SpecError for a model without trained parameters.
        """
        if precision not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise SpecError(f"precision is {precision!r}; there are: {known}")
        if every < 1:
            raise SpecError(f"every is {every}; it must be 1 or more steps")
        self.precision = precision
        self.every = every
        self.steps = 0  # those that the scaler left out are counted
        self.skipped = 0  # of them, left out: each one a back-off of the loss scale
        self.samples = 0
        self.overflowed: dict[tuple[str, str], int] = {}  # FP8 values, of sampled steps
        self.alarms: dict[str, int] = {}  # by metric
        self.latest: Reading | None = None
        self.loss: float | None = None
        self._layers = layer_parameters(model)
        if not self._layers:
            raise SpecError("the model has no trained parameters: all are frozen")
        self._optimizer, self._scaler = optimizer, scaler
        self._watch = Watch(thresholds or Thresholds())
        self._on_alarm, self._log = tuple(on_alarm), log
        self._outputs = OutputWatch(model) if outputs else None
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_update),
            optimizer.register_step_post_hook(self._after_update),
        ]
        self._trouble_at = -every  # the step of the last sample that trouble caused
        self._begin_step(sampling=True)
        self._sampled_at = (0, time.perf_counter())

    def close(self) -> None:
        """Take every hook away."""
        for hook in self._hooks:
            hook.remove()
        if self._outputs:
            self._outputs.disarm()

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of the next step. None: the loss is not scaled."""
        scaler = self._scaler
        return scaler.get_scale() if scaler and scaler.is_enabled() else None

    @property
    def sampling(self) -> bool:
        """Whether the step under way is looked into."""
        return self._sampling

    # -- hooks of the optimizer ------------------------------------------------

    def _begin_step(self, sampling: bool) -> None:
        self._updated = False
        self._looked: dict[str, Look] = {}
        self._unchanged: dict[str, float] = {}
        self._watched: Watched | None = None
        self._sampling = sampling
        if sampling and self._outputs:
            self._outputs.arm()

    def _before_update(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        # Fused optimizers are called for every step, and unscale and skip themselves.
        found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        self._updated = found_inf is None or not float(found_inf)
        if not self._sampling:
            return
        self._watched = Watched(self._layers) if self._updated else None
        # A closure, as of Lightning, computes the gradients later, inside the step.
        closure = next((c for c in (*args, kwargs.get("closure")) if callable(c)), None)
        if closure is None:
            scale: Tensor | None = getattr(optimizer, "grad_scale", None)
            self._looked = looks(self._layers, 1.0 if scale is None else scale)

    def _after_update(self, *_: object) -> None:
        if self._watched is not None:
            self._looked = self._looked or looks(self._layers)
            self._unchanged = self._watched.unchanged()
            self._watched = None

    # -- steps -------------------------------------------------------------------

    def step(
        self,
        loss: Tensor | float | None = None,
        gradient_norm: Tensor | float | None = None,
    ) -> list[Alarm]:
        """End one optimizer step; return the alarms that ring now.

        After `scaler.update()`, before gradients are set to zero. `loss` without its
        scale, `gradient_norm` before clipping.
        """
        number, skipped = self.steps, not self._updated
        self.steps += 1
        self.skipped += skipped
        alarms = self._watch.step(number, skipped)
        reading = self._read(number, skipped, gradient_norm) if self._sampling else None
        if reading is not None:
            alarms += self._watch.read(reading)
        self._tell(number, skipped, loss, gradient_norm, reading, alarms)
        self._begin_step(self._samples_next(skipped))
        return alarms

    def _samples_next(self, skipped: bool) -> bool:
        if skipped and self.steps - self._trouble_at >= self.every:
            self._trouble_at = self.steps
            return True
        return self.steps % self.every == 0

    def _read(
        self, number: int, skipped: bool, gradient_norm: Tensor | float | None
    ) -> Reading:
        if not self._looked:  # the optimizer was not called: gradients are still there
            self._looked = looks(self._layers)
        outputs = self._outputs.disarm() if self._outputs else {}
        rates = learning_rates(self._optimizer)
        layers = {
            name: self._layer(name, outputs.get(name, LayerReading()), rates)
            for name in {**outputs, **self._looked}  # in the order of the model
        }
        self.samples += 1
        self.latest = Reading(
            step=number,
            precision=self.precision,
            learning_rate=max(rates.values()),
            loss_scale=self.loss_scale,
            gradient_norm=total_norm(self._looked.values())
            if gradient_norm is None
            else as_float(gradient_norm),
            step_s=self._step_s(),
            skipped=skipped,
            layers=layers,
        )
        return self.latest

    def _layer(
        self, name: str, output: LayerReading, rates: Mapping[int, float]
    ) -> LayerReading:
        for tensor, count in output.overflowed.items():
            key = (name, tensor)
            self.overflowed[key] = self.overflowed.get(key, 0) + count
        look = self._looked.get(name)
        if look is None:
            return output
        if not self._updated:  # clipped by a norm that is not finite: zeros, and NaN
            return replace(output, nonfinite=look.nonfinite)
        rate = max(rates.get(id(p), 0.0) for p in self._layers[name])
        return replace(
            output,
            zero_rate=look.zero_rate,
            bf16_underflow=look.underflow_share,
            gradient_norm=look.gradient_norm,
            update_ratio=look.update_ratio(rate),
            unchanged=self._unchanged.get(name),
            nonfinite=look.nonfinite,
        )

    def _step_s(self) -> float:
        """Return the seconds of a step, on average since the last sample."""
        (step, then), now = self._sampled_at, time.perf_counter()
        self._sampled_at = (self.steps, now)
        return (now - then) / max(self.steps - step, 1)

    def _tell(
        self,
        number: int,
        skipped: bool,
        loss: Tensor | float | None,
        gradient_norm: Tensor | float | None,
        reading: Reading | None,
        alarms: list[Alarm],
    ) -> None:
        if loss is not None and (self._log or reading):
            self.loss = as_float(loss)
        for alarm in alarms:
            name = str(alarm.metric)  # a checkpoint holds plain values alone
            self.alarms[name] = self.alarms.get(name, 0) + 1
        if not _is_first():
            return
        for alarm in alarms:
            for ring in self._on_alarm:
                ring(alarm)
        if self._log:
            self._log(self._record(number, skipped, gradient_norm, reading))

    def _record(
        self,
        number: int,
        skipped: bool,
        gradient_norm: Tensor | float | None,
        reading: Reading | None,
    ) -> dict[str, Any]:
        """Return a line of a log; `optimizer.training.logs` reads it."""
        norm = as_float(gradient_norm)
        record: dict[str, Any] = {
            "step": number,
            "loss": self.loss,
            "grad_norm": norm if reading is None else reading.gradient_norm,
            "loss_scale": self.loss_scale,
            "learning_rate": max(learning_rates(self._optimizer).values()),
            "skipped": skipped,
            "precision": self.precision,
        }
        if reading is not None:
            record["layers"] = {n: r.to_json() for n, r in reading.layers.items()}
        return {name: value for name, value in record.items() if value is not None}

    # -- checkpoints ---------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs, the scaler's state included."""
        return {
            "steps": self.steps,
            "skipped": self.skipped,
            "samples": self.samples,
            "overflowed": [[*key, n] for key, n in self.overflowed.items()],
            "alarms": dict(self.alarms),
            "trouble_at": self._trouble_at,
            "sampling": self._sampling,
            "watch": self._watch.state(),
            "scaler": self._scaler.state_dict() if self._scaler else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises SpecError without its scaler."""
        if (state["scaler"] is None) != (self._scaler is None):
            had = "has none" if state["scaler"] is None else "has one"
            raise SpecError(f"the checkpoint {had}, the run differs: a GradScaler")
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])
        self.steps, self.skipped = state["steps"], state["skipped"]
        self.samples, self.alarms = state["samples"], dict(state["alarms"])
        self.overflowed = {(a, b): n for a, b, n in state["overflowed"]}
        self._trouble_at = state["trouble_at"]
        self._watch.load(state["watch"])
        self._sampled_at = (self.steps, time.perf_counter())
        if self._outputs:
            self._outputs.disarm()
        self._begin_step(state["sampling"])


def _is_first() -> bool:
    """Whether this process speaks for all."""
    spread = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not spread or torch.distributed.get_rank() == 0
