"""HealthMonitor on a two-layer model: figures, accumulation, clipping, resuming."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from optimizer.errors import SpecError
from optimizer.formats import E4M3, E5M2, Format
from optimizer.training.health import Alarm, Metric, Thresholds
from optimizer.training.monitor import HealthMonitor
from tests.training.two_layers import TwoLayers, batch, by_hand, by_hand_norm, loss_of

CLOSE = 64 * 2.0**-24


def sgd(model: nn.Module, rate: float = 0.01) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=rate)


def gradient_scaler(first: float = 2.0**16, grows: int = 2000) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=first, growth_interval=grows)


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    monitor: HealthMonitor,
    scaler: torch.amp.GradScaler | None = None,
    clip: float | None = None,
    parts: int = 1,
    x: torch.Tensor | None = None,
) -> list[Alarm]:
    """One step over `batch()`, its rows in so many parts of equal size."""
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    total = 0.0
    for part in (batch() if x is None else x).chunk(parts):
        loss = loss_of(model, part) / parts
        scaler.scale(loss).backward()
        total += float(loss.detach())
    norm = None
    if clip is not None:
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    alarms = monitor.step(total, norm)
    optimizer.zero_grad()
    return alarms


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("scaled", [False, True])
def test_readings_are_those_by_hand(parts: int, scaled: bool) -> None:
    model = TwoLayers()
    hand = by_hand(model, batch())
    weights = model.second.weight.detach().double().norm().item()
    optimizer, scaler = sgd(model), gradient_scaler() if scaled else None
    monitor = HealthMonitor(model, optimizer, precision="fp16", scaler=scaler)
    step(model, optimizer, monitor, scaler, parts=parts)
    reading = monitor.latest
    assert reading is not None
    assert reading.gradient_norm == pytest.approx(by_hand_norm(hand), rel=CLOSE)
    assert reading.layers["first"].zero_rate == 1 / 6
    assert reading.layers["first"].bf16_underflow == 1 / 5
    second = reading.layers["second"]
    norm = float((hand["second"] ** 2).sum() ** 0.5)
    assert second.gradient_norm == pytest.approx(norm, rel=CLOSE)
    assert second.update_ratio == pytest.approx(0.01 * norm / weights, rel=CLOSE)
    assert second.unchanged == 0.0
    assert reading.loss_scale == (2.0**16 if scaled else None)


@pytest.mark.parametrize("scaled", [False, True])
def test_the_norm_is_the_one_before_clipping(scaled: bool) -> None:
    model = TwoLayers()
    hand = by_hand(model, batch())
    optimizer, scaler = sgd(model), gradient_scaler() if scaled else None
    monitor = HealthMonitor(model, optimizer, precision="fp16", scaler=scaler)
    step(model, optimizer, monitor, scaler, clip=0.01)
    reading = monitor.latest
    assert reading is not None
    assert reading.gradient_norm == pytest.approx(by_hand_norm(hand), rel=CLOSE)
    clipped = [layer.gradient_norm or 0.0 for layer in reading.layers.values()]
    assert sum(n**2 for n in clipped) ** 0.5 == pytest.approx(0.01, rel=1e-3)


def test_a_fused_optimizer_is_looked_at_unscaled() -> None:
    model = TwoLayers()
    hand = by_hand(model, batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    scaler = gradient_scaler()
    monitor = HealthMonitor(model, optimizer, precision="fp16", scaler=scaler)
    step(model, optimizer, monitor, scaler)
    assert monitor.latest is not None
    assert monitor.latest.gradient_norm == pytest.approx(by_hand_norm(hand), rel=CLOSE)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_the_scaler_left_out_are_back_offs(fused: bool) -> None:
    model = TwoLayers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
    scaler = gradient_scaler(2.0**127)  # gradients above 2 overflow fp32 under it
    monitor = HealthMonitor(model, optimizer, precision="fp16", scaler=scaler)
    for _ in range(6):
        step(model, optimizer, monitor, scaler)
    halved = 127 - int(torch.tensor(scaler.get_scale()).log2())
    assert 0 < monitor.skipped == halved < 6
    assert monitor.samples == 2  # the first step, and one for the trouble


def test_every_n_th_step_is_sampled() -> None:
    model = TwoLayers()
    optimizer = sgd(model)
    monitor = HealthMonitor(model, optimizer, precision="bf16", every=3)
    seen = []
    for _ in range(8):
        step(model, optimizer, monitor)
        assert monitor.latest is not None
        seen.append(monitor.latest.step)
    assert seen == [0, 0, 0, 3, 3, 3, 6, 6]


def test_hooks_of_layers_are_there_in_sampled_steps_alone() -> None:
    model = TwoLayers()
    optimizer = sgd(model)
    monitor = HealthMonitor(model, optimizer, precision="bf16", every=10)
    hooks = [len(model.first._forward_hooks)]
    for _ in range(3):
        step(model, optimizer, monitor)
        hooks.append(len(model.first._forward_hooks))
    assert hooks == [1, 0, 0, 0]
    monitor.close()
    assert not optimizer._optimizer_step_pre_hooks


def test_an_evaluation_is_not_counted_as_the_layers_outputs() -> None:
    model = TwoLayers()
    optimizer = sgd(model)
    monitor = HealthMonitor(model, optimizer, precision="bf16")
    with torch.no_grad():
        model(1e9 * batch())
    step(model, optimizer, monitor)
    assert monitor.latest is not None
    assert monitor.latest.layers["first"].output_amax == pytest.approx(
        model.first(batch()).abs().max().item(), rel=0.1
    )


def test_an_alarm_rings_once_and_calls_back() -> None:
    model = TwoLayers()
    optimizer = sgd(model)
    heard: list[Alarm] = []
    monitor = HealthMonitor(
        model, optimizer, precision="fp16", every=1, on_alarm=[heard.append]
    )
    rung = [step(model, optimizer, monitor) for _ in range(5)]
    # A sixth of the first layer's gradient is zero, a fifth of the rest underflows.
    assert [len(alarms) for alarms in rung] == [0, 2, 0, 0, 0]
    assert {(a.metric, a.layer) for a in heard} == {
        (Metric.ZERO_RATE, "first"),
        (Metric.BF16_UNDERFLOW, "first"),
    }
    assert str(heard[0]) == ("step 1: zero_rate is 0.167 in first (threshold 0.05)")


def test_zeros_do_not_ring_where_the_loss_needs_no_scale() -> None:
    model = TwoLayers()
    optimizer = sgd(model)
    thresholds = Thresholds(bf16_underflow=1.0)
    monitor = HealthMonitor(
        model, optimizer, precision="bf16", every=1, thresholds=thresholds
    )
    assert not any(step(model, optimizer, monitor) for _ in range(5))


def test_weights_that_do_not_move_ring_but_not_at_a_rate_of_zero() -> None:
    model = TwoLayers().bfloat16()
    optimizer = sgd(model, rate=0.0)
    thresholds = Thresholds(bf16_underflow=1.0)
    monitor = HealthMonitor(
        model, optimizer, precision="bf16", every=1, thresholds=thresholds
    )
    x = batch().bfloat16()
    assert not any(step(model, optimizer, monitor, x=x) for _ in range(3))
    optimizer.param_groups[0]["lr"] = 1e-9
    rung = [a for _ in range(3) for a in step(model, optimizer, monitor, x=x)]
    # The first layer has a column of 1e-39, as small as its updates: 1 of 5 moves.
    values = {a.layer: a.value for a in rung if a.metric is Metric.UNCHANGED}
    assert values == {"first": 0.8, "second": 1.0}


class Fp8Layer(nn.Linear):
    """A linear layer that says it multiplies in FP8 with scales made for amax 1."""

    def fp8_scales(self) -> Mapping[str, tuple[float, Format]]:
        return {"input": (1 / E4M3.max, E4M3), "gradient": (1 / E5M2.max, E5M2)}


def test_values_beyond_fp8_are_counted_by_tensor() -> None:
    model = nn.Sequential(Fp8Layer(4, 1, bias=False))
    optimizer = sgd(model)
    monitor = HealthMonitor(model, optimizer, precision="fp8")
    # Half of e4m3's smallest number is 2^-10, of 448: under 2.18e-6 all become zero.
    x = torch.tensor([[0.5, 1.5, -3.0, 2e-6], [0.0, 1.0, 0.1, -1e-7]])
    (model(x).sum() * 2).backward()
    optimizer.step()
    monitor.step()
    assert monitor.latest is not None
    layer = monitor.latest.layers["0"]
    assert layer.overflowed == {"input": 2, "gradient": 2}
    assert layer.flushed == {"input": 2 / 7, "gradient": 0.0}
    assert layer.scales["input"] == 1 / 448
    assert monitor.overflowed == {("0", "input"): 2, ("0", "gradient"): 2}


def test_a_record_of_each_step_is_json() -> None:
    model = TwoLayers()
    optimizer, records = sgd(model), []
    monitor = HealthMonitor(
        model, optimizer, precision="bf16", every=2, log=records.append
    )
    for _ in range(3):
        step(model, optimizer, monitor, clip=1.0)
    read: list[dict[str, Any]] = json.loads(json.dumps(records))
    assert [r["step"] for r in read] == [0, 1, 2]
    assert ["layers" in r for r in read] == [True, False, True]
    assert read[1].keys() == {
        "step", "loss", "grad_norm", "learning_rate", "skipped", "precision"
    }  # fmt: skip
    assert read[0]["layers"]["first"]["zero_rate"] == 1 / 6


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped() -> None:
    def started() -> tuple[Any, ...]:
        model = TwoLayers()
        optimizer, scaler = sgd(model), gradient_scaler(2.0**127, grows=4)
        monitor = HealthMonitor(
            model, optimizer, precision="fp16", scaler=scaler, every=3
        )
        return model, optimizer, scaler, monitor

    whole, first, second = started(), started(), started()
    for _ in range(9):
        step(whole[0], whole[1], whole[3], whole[2])
    for _ in range(4):
        step(first[0], first[1], first[3], first[2])
    for now, then in zip(second, first, strict=True):
        if now is not second[2]:  # the monitor brings the scaler's state along
            now.load_state_dict(then.state_dict())
    for _ in range(5):
        step(second[0], second[1], second[3], second[2])
    assert second[3].state_dict() == whole[3].state_dict()
    assert second[3].latest.layers == whole[3].latest.layers
    assert second[2].get_scale() == whole[2].get_scale()


def test_resuming_without_the_scaler_is_refused() -> None:
    model = TwoLayers()
    optimizer = sgd(model)
    scaled = HealthMonitor(model, optimizer, precision="fp16", scaler=gradient_scaler())
    plain = HealthMonitor(model, optimizer, precision="bf16")
    with pytest.raises(SpecError, match="GradScaler"):
        plain.load_state_dict(scaled.state_dict())


def test_what_cannot_be_watched_is_refused() -> None:
    model = TwoLayers()
    with pytest.raises(SpecError, match="'half'; there are: fp32, bf16, fp16, fp8"):
        HealthMonitor(model, sgd(model), precision="half")
    with pytest.raises(SpecError, match="every is 0"):
        HealthMonitor(model, sgd(model), precision="bf16", every=0)
    optimizer = sgd(model)
    with pytest.raises(SpecError, match="all are frozen"):
        HealthMonitor(model.requires_grad_(False), optimizer, precision="bf16")
