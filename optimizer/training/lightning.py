"""The monitor and the scheduler as callbacks of Lightning.

    Trainer(callbacks=[HealthCallback(), PrecisionCallback(Policy(low="bf16", high="fp32"))])

Either of its packages will do: lightning, or pytorch-lightning. Steps are those of the
first optimizer; what is accumulated counts once. State goes into Lightning's checkpoints.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.utils import get_total_norm

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    from pytorch_lightning import Callback

from optimizer.training.health import Thresholds
from optimizer.training.metrics import as_float
from optimizer.training.monitor import EVERY, HealthMonitor, Log, Ring
from optimizer.training.scheduler import PrecisionScheduler, Switched
from optimizer.training.stability import Policy

PRECISIONS = {"16": "fp16", "bf": "bf16", "32": "fp32", "tr": "fp8"}  # of a plugin


class HealthCallback(Callback):
    """A HealthMonitor in Lightning's Trainer, from the first step on."""

    def __init__(
        self,
        every: int = EVERY,
        thresholds: Thresholds | None = None,
        on_alarm: Iterable[Ring] = (),
        log: Log | None = None,
        precision: str | None = None,
    ) -> None:
        """`precision` None: what the Trainer's plugin says."""
        self.monitor: HealthMonitor | None = None
        self._every, self._thresholds = every, thresholds
        self._on_alarm, self._log, self._precision = tuple(on_alarm), log, precision
        self._found: Mapping[str, Any] | None = None
        self._norm: float | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Hook into the optimizer that Lightning has made."""
        plugin = trainer.precision_plugin
        said = str(getattr(plugin, "precision", "32"))
        self.monitor = HealthMonitor(
            pl_module,
            trainer.optimizers[0],
            precision=self._precision or PRECISIONS.get(said[:2], "fp32"),
            scaler=getattr(plugin, "scaler", None),
            every=self._every,
            thresholds=self._thresholds,
            on_alarm=self._on_alarm,
            log=self._log,
        )
        if self._found is not None:
            self.monitor.load_state_dict(self._found)

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: Any
    ) -> None:
        """See the norm of a step that is sampled, before gradients are clipped."""
        sampling = self.monitor is not None and self.monitor.sampling
        self._norm = _norm(pl_module) if sampling else None

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a step, if the batch was the last of one. The loss is that batch's."""
        if self.monitor is not None and _ends_step(trainer, batch_idx):
            self.monitor.step(_loss(outputs), self._norm)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Take the hooks away."""
        if self.monitor:
            self.monitor.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return self.monitor.state_dict() if self.monitor else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint was taken, once the run begins."""
        self._found = state_dict or None


class PrecisionCallback(Callback):
    """A PrecisionScheduler in Lightning's Trainer."""

    def __init__(
        self, policy: Policy | None = None, on_switch: Iterable[Switched] = ()
    ) -> None:
        self.scheduler = PrecisionScheduler(policy, on_switch)
        self._norm: float | None = None
        self._handles: list[Any] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Put forward passes into the precision of the moment."""
        device = pl_module.device.type
        # `training_step` calls the parts of the module, not the module itself.
        for part in pl_module.children():
            self._handles += self.scheduler.attach(part, device)

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: Any
    ) -> None:
        """See the gradients: unscaled, and not yet clipped."""
        self._norm = _norm(pl_module)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Decide what the next step runs in."""
        if _ends_step(trainer, batch_idx):
            self.scheduler.step(_loss(outputs), self._norm)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint was taken."""
        self.scheduler.load_state_dict(state_dict)


def _norm(module: nn.Module) -> float:
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return float(get_total_norm(gradients))


def _ends_step(trainer: Any, batch_idx: int) -> bool:
    """Whether gradients of this batch were the last that a step accumulates."""
    last = batch_idx + 1 == trainer.num_training_batches
    return last or (batch_idx + 1) % trainer.accumulate_grad_batches == 0


def _loss(outputs: Any) -> float | None:
    """Return the loss of `training_step`'s result, as Lightning hands it on."""
    return (
        as_float(outputs["loss"]) if isinstance(outputs, Mapping) else as_float(outputs)
    )
