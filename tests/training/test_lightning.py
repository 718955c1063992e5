"""The callbacks in a real Trainer of Lightning, on a CPU."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from optimizer.training.health import Alarm
from optimizer.training.stability import Policy
from tests.training.two_layers import TwoLayers, batch, by_hand, by_hand_norm, loss_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    import pytorch_lightning as pl

    from optimizer.training.lightning import HealthCallback, PrecisionCallback

pytestmark = pytest.mark.filterwarnings("ignore")  # of its data loaders and loggers
CLOSE = 64 * 2.0**-24
ROWS = batch(rows=32)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = TwoLayers()
        self.seen: list[torch.dtype] = []

    def training_step(self, x: Tensor, number: int) -> Tensor:
        self.seen.append(self.layers(x).dtype)
        return loss_of(self.layers, x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trained(
    folder: Path,
    callbacks: list[Any],
    module: Module | None = None,
    resume: Path | None = None,
    rows: int = 4,
    **more: Any,
) -> pl.Trainer:
    options = {"max_steps": 4, "gradient_clip_val": 0.01} | more
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        default_root_dir=str(folder),
        **options,
    )
    loader = DataLoader(ROWS, batch_size=rows)  # type: ignore[arg-type]
    trainer.fit(module or Module(), loader, ckpt_path=resume and str(resume))
    return trainer


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_is_all_that_was_accumulated_and_its_norm_is_not_clipped(
    tmp_path: Path, parts: int
) -> None:
    health = HealthCallback(every=1)
    trained(
        tmp_path, [health], max_steps=1, rows=8 // parts, accumulate_grad_batches=parts
    )
    monitor = health.monitor
    assert monitor is not None
    assert monitor.steps == 1
    assert monitor.latest is not None
    hand = by_hand_norm(by_hand(TwoLayers(), ROWS[:8]))
    assert monitor.latest.gradient_norm == pytest.approx(hand, rel=CLOSE)
    clipped = [r.gradient_norm or 0 for r in monitor.latest.layers.values()]
    assert sum(n**2 for n in clipped) ** 0.5 == pytest.approx(0.01, rel=1e-3)


def test_alarms_ring_and_the_log_has_every_step(tmp_path: Path) -> None:
    heard: list[Alarm] = []
    log: list[Any] = []
    health = HealthCallback(every=2, on_alarm=[heard.append], log=log.append)
    trained(tmp_path, [health], precision="bf16-mixed")
    assert [record["step"] for record in log] == [0, 1, 2, 3]
    assert log[0]["precision"] == "bf16"
    assert heard
    assert heard[0].layer == "layers.first"


def test_a_checkpoint_keeps_both_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    policy = Policy(
        low="bf16", high="fp32", gradient_ratio=1.0001, warmup_steps=2, run_steps=1
    )
    first = [HealthCallback(every=3), PrecisionCallback(policy)]
    module = Module()
    trainer = trained(tmp_path, first, module, max_steps=6)
    assert first[1].scheduler.persistent
    assert module.seen[0] is torch.bfloat16
    assert module.seen[-1] is torch.float32
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    second = [HealthCallback(every=3), PrecisionCallback(policy)]
    trained(tmp_path, second, resume=path, max_steps=8)
    assert second[0].monitor is not None
    assert second[0].monitor.steps == 8
    assert second[1].scheduler.persistent
