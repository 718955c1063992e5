"""The callbacks in a real Trainer of transformers, on a CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from optimizer.training.callbacks import HealthCallback, PrecisionCallback
from optimizer.training.health import Alarm, Metric
from optimizer.training.log_files import read_log
from optimizer.training.stability import Policy
from tests.training.two_layers import TwoLayers, batch, by_hand, loss_of

CLOSE = 64 * 2.0**-24
ROWS = batch(rows=32)


class Net(nn.Module):
    """The two layers as a Trainer wants them; remembers what it computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = TwoLayers()
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.seen.append(self.layers.first(x).dtype)
        return {"loss": loss_of(self.layers, x)}


def trained(
    folder: Path,
    callbacks: list[Any],
    resume: bool = False,
    model: Net | None = None,
    rows: Tensor = ROWS,
    **more: Any,
) -> Trainer:
    options = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_steps": 2,
        "learning_rate": 0.01,
        "max_grad_norm": 0.01,
        "lr_scheduler_type": "constant",
    } | more
    arguments = TrainingArguments(
        output_dir=str(folder),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        optim="sgd",
        seed=0,
        dataloader_pin_memory=False,
        **options,
    )
    trainer = Trainer(
        model=model or Net(),
        args=arguments,
        train_dataset=[{"x": row} for row in rows],
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(autouse=True)
def _quiet(capfd: pytest.CaptureFixture[str]) -> None:
    """The Trainer prints each line of its log."""


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_is_all_that_was_accumulated(tmp_path: Path, parts: int) -> None:
    health = HealthCallback(every=1)
    model = Net()
    order: list[Tensor] = []
    model.register_forward_pre_hook(
        lambda m, args, given: order.append(given["x"].clone()), with_kwargs=True
    )
    start = TwoLayers()
    trained(
        tmp_path,
        [health],
        model=model,
        max_steps=1,
        per_device_train_batch_size=8 // parts,
        gradient_accumulation_steps=parts,
        max_grad_norm=0,
    )
    assert health.monitor is not None
    assert health.monitor.steps == 1
    reading = health.monitor.latest
    assert reading is not None
    hand = by_hand(start, torch.cat(order))
    norm = float((hand["second"] ** 2).sum() ** 0.5)
    seen = reading.layers["layers.second"].gradient_norm
    assert seen == pytest.approx(norm, rel=CLOSE)


def test_the_trainers_own_log_holds_what_a_doctor_reads(tmp_path: Path) -> None:
    heard: list[Alarm] = []
    trained(tmp_path, [HealthCallback(every=2, on_alarm=[heard.append])], bf16=True)
    log = read_log(tmp_path)
    assert log.precision == "bf16"
    assert [bool(r.layers) for r in log.records] == [True, False, True, False]
    assert log.records[0].layers["layers.first"]["zero_rate"] >= 1 / 6
    norms = [norm for _, norm in log.series("gradient_norm")]
    assert min(norms) > 0.01  # before clipping, as the Trainer has it
    # The third step is the second that shows a fifth of a gradient below 2^-126.
    assert {a.metric for a in heard} == {Metric.BF16_UNDERFLOW}


def test_a_resumed_trainer_goes_on_with_the_monitors_counts(tmp_path: Path) -> None:
    whole, first, second = HealthCallback(every=2), HealthCallback(2), HealthCallback(2)
    trained(tmp_path / "whole", [whole])
    trained(tmp_path / "parts", [first], max_steps=2)
    trained(tmp_path / "parts", [second], resume=True)
    assert whole.monitor is not None
    assert second.monitor is not None
    assert second.monitor.state_dict() == whole.monitor.state_dict()
    assert second.monitor.steps == 4


def test_a_scheduler_switches_the_trainers_precision_and_goes_on_so(
    tmp_path: Path,
) -> None:
    # A norm of a ten-thousandth above its mean is unstable here: the first that grows.
    policy = Policy(
        low="bf16", high="fp32", gradient_ratio=1.0001, warmup_steps=2, run_steps=1
    )
    model, scheduler = Net(), PrecisionCallback(policy)
    trained(tmp_path, [scheduler], model=model, max_steps=6)
    assert scheduler.scheduler.persistent
    assert model.seen[0] is torch.bfloat16
    assert model.seen[-1] is torch.float32
    again = PrecisionCallback(policy)
    trained(tmp_path, [again], resume=True, max_steps=8)
    assert again.scheduler.persistent
    saved = json.loads((tmp_path / "checkpoint-6/trainer_state.json").read_text())
    assert "PrecisionCallback" in saved["stateful_callbacks"]
