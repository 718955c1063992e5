"""The monitor and the scheduler as callbacks of transformers' Trainer.

    Trainer(..., callbacks=[HealthCallback(), PrecisionCallback(Policy(low="bf16", high="fp32"))])

HealthCallback adds to the Trainer's own log: the loss scale, the precision, and what
the last sample showed of each layer. So `precision doctor trainer_state.json` knows all
that it can know. Both keep their state in the checkpoint's trainer_state.json and go on
from it, without `restore_callback_states_from_checkpoint`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from optimizer.training.health import Thresholds
from optimizer.training.monitor import EVERY, HealthMonitor, Ring
from optimizer.training.scheduler import PrecisionScheduler, Switched
from optimizer.training.stability import Policy


class _Kept(TrainerCallback, ExportableState, ABC):
    """A callback whose state is in the checkpoint."""

    def state(self) -> dict[str, Any]:
        """Return what the Trainer writes into trainer_state.json."""
        return {"args": {}, "attributes": {"kept": self._state()}}

    @abstractmethod
    def _state(self) -> dict[str, Any] | None:
        """Return what a resumed run goes on from. None: the run has not begun."""

    def _found(self, state: Any) -> dict[str, Any] | None:
        """Return what a resumed run left. None: this one begins."""
        kept = state.stateful_callbacks.get(type(self).__name__)
        return kept["attributes"]["kept"] if kept else None


class HealthCallback(_Kept):
    """A HealthMonitor in a Trainer. `monitor` is there from the first step on."""

    def __init__(
        self,
        every: int = EVERY,
        thresholds: Thresholds | None = None,
        on_alarm: Iterable[Ring] = (),
        precision: str | None = None,
        *,
        outputs: bool = True,
    ) -> None:
        """`precision` None: what the Trainer's arguments say."""
        self.monitor: HealthMonitor | None = None
        self._every, self._thresholds = every, thresholds
        self._on_alarm, self._precision = tuple(on_alarm), precision
        self._outputs = outputs
        self._told = -1  # step of the last sample that the log has

    def _state(self) -> dict[str, Any] | None:
        return self.monitor.state_dict() if self.monitor else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Hook into the optimizer that the Trainer has made."""
        wrapped = given["optimizer"]  # accelerate's, around torch's
        self.monitor = HealthMonitor(
            given["model"],
            getattr(wrapped, "optimizer", wrapped),
            precision=self._precision or _precision(args),
            scaler=getattr(wrapped, "scaler", None),
            every=self._every,
            thresholds=self._thresholds,
            on_alarm=self._on_alarm,
            outputs=self._outputs,
        )
        found = self._found(state)
        if found is not None:
            self.monitor.load_state_dict(found)

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, **given: Any
    ) -> None:
        """End a step: the gradients are still there."""
        assert self.monitor is not None
        self.monitor.step()

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Add to the line of the log what the monitor knows."""
        monitor = self.monitor
        if (
            monitor is None
            or not state.log_history
            or "loss" not in (given["logs"] or {})
        ):
            return
        line = state.log_history[-1]
        monitor.loss = float(line["loss"])
        line["precision"] = monitor.precision
        if monitor.loss_scale is not None:
            line["loss_scale"] = monitor.loss_scale
        reading = monitor.latest
        if reading is not None and reading.step > self._told:
            self._told = reading.step
            line["layers"] = {n: r.to_json() for n, r in reading.layers.items()}

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Take the hooks away."""
        if self.monitor:
            self.monitor.close()


class PrecisionCallback(_Kept):
    """A PrecisionScheduler in a Trainer: it decides at every line of the log.

    The Trainer tells losses and norms in its log alone: take `logging_steps=1` to
    decide at every step.
    """

    def __init__(
        self, policy: Policy | None = None, on_switch: Iterable[Switched] = ()
    ) -> None:
        self.scheduler = PrecisionScheduler(policy, on_switch)
        self._handles: list[Any] = []

    def _state(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Put forward passes into the precision of the moment."""
        found = self._found(state)
        if found is not None and state.global_step:
            self.scheduler.load_state_dict(found)
        self._handles = self.scheduler.attach(given["model"], args.device.type)

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """See the loss and the norm of a line."""
        logs = given["logs"] or {}
        if "loss" in logs:
            self.scheduler.step(logs["loss"], logs.get("grad_norm"))

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


def _precision(args: Any) -> str:
    if args.fp16:
        return "fp16"
    return "bf16" if args.bf16 else "fp32"
