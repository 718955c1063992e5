"""PrecisionScheduler: which steps are unstable, and what follows."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimizer.errors import SpecError
from optimizer.training.scheduler import PrecisionScheduler
from optimizer.training.stability import Outcome, Policy, Stability, step

POLICY = Policy(calm_steps=3, run_steps=3, warmup_steps=4, memory=0.9)
CALM = [2.0, 2.1, 1.9, 2.0, 2.1, 1.9, 2.0, 2.1]  # mean deviation 0.1 at most
SPIKE = 4.0


def after(losses: list[float], policy: Policy = POLICY) -> list[str]:
    """Return the precision that follows each loss; the norm stays 1."""
    state, seen = Stability(), []
    for loss in losses:
        state = step(state, policy, Outcome(loss, 1.0))
        seen.append(state.precision(policy))
    return seen


def test_a_calm_run_stays_low() -> None:
    assert set(after(CALM * 5)) == {"fp16"}


def test_the_means_of_a_warm_up_are_plain_means() -> None:
    state = Stability()
    for loss, norm in ((1.0, 4.0), (2.0, 8.0), (3.0, 12.0)):
        state = step(state, POLICY, Outcome(loss, norm))
    assert state.mean_loss == pytest.approx((1 + 2 + 3) / 3)
    assert state.mean_norm == pytest.approx((4 + 8 + 12) / 3)
    # Each deviation is from the mean before: |2 - 1|, |3 - 1.5|, and 0 at first.
    assert state.deviation == pytest.approx((0 + 1 + 1.5) / 3)


def test_a_spike_is_followed_by_high_steps_until_it_is_calm_again() -> None:
    seen = after([*CALM, SPIKE, 2.0, 2.0, 2.0, 2.0])
    assert seen[len(CALM) :] == ["bf16", "bf16", "bf16", "fp16", "fp16"]


def test_a_step_between_both_thresholds_keeps_what_there_is() -> None:
    state = replace(
        Stability(steps=100, mean_loss=2.0, deviation=0.1, mean_norm=1.0), high=True
    )
    policy = replace(POLICY, memory=0.0)
    between = Outcome(2.0 + 0.1 * policy.loss_deviation * 0.75, 1.0)
    assert step(state, policy, between).calm == 0
    assert step(state, policy, between).high
    assert not step(replace(state, high=False), policy, between).high


def test_a_run_of_unstable_steps_switches_for_good() -> None:
    seen = after([*CALM, SPIKE, SPIKE * 2, SPIKE * 4, *CALM * 10])
    assert set(seen[len(CALM) :]) == {"bf16"}


def test_spikes_far_apart_do_not_add_up() -> None:
    losses = [*CALM, SPIKE, *CALM * 2] * 6
    assert after(losses)[-1] == "fp16"


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_unstable_even_in_warm_up(loss: float) -> None:
    assert after([2.0, loss]) == ["fp16", "bf16"]


def test_a_gradient_norm_of_ten_times_the_mean_is_unstable() -> None:
    state = Stability()
    for loss in CALM:
        state = step(state, POLICY, Outcome(loss, 1.0))
    assert not step(state, POLICY, Outcome(2.0, 9.9)).high
    assert step(state, POLICY, Outcome(2.0, 10.1)).high
    assert step(state, POLICY, Outcome(None, math.inf)).high


def test_one_back_off_is_the_scaler_at_work_and_two_in_a_row_are_not() -> None:
    state = Stability()
    for loss in CALM:
        state = step(state, POLICY, Outcome(loss, 1.0))
    once = step(state, POLICY, Outcome(2.0, math.inf, skipped=True))
    assert not once.high
    assert step(once, POLICY, Outcome(2.0, math.inf, skipped=True)).high
    assert once.mean_norm == state.mean_norm


def test_a_spike_moves_the_means_no_further_than_its_threshold() -> None:
    state = Stability(steps=100, mean_loss=2.0, deviation=0.1, mean_norm=1.0)
    moved = step(state, POLICY, Outcome(1e6, 1e6))
    assert moved.mean_loss == pytest.approx(0.9 * 2 + 0.1 * (2 + 6 * 0.1))
    assert moved.mean_norm == pytest.approx(0.9 * 1 + 0.1 * 10)


def test_a_resumed_scheduler_decides_as_the_one_that_went_on() -> None:
    losses = [*CALM, SPIKE, 2.0, SPIKE, *CALM, SPIKE, *CALM]
    whole, first = PrecisionScheduler(POLICY), PrecisionScheduler(POLICY)
    expected = [whole.step(loss, 1.0) for loss in losses]
    seen = [first.step(loss, 1.0) for loss in losses[:10]]
    second = PrecisionScheduler(POLICY)
    second.load_state_dict(first.state_dict())
    seen += [second.step(loss, 1.0) for loss in losses[10:]]
    assert seen == expected
    assert second.state_dict() == whole.state_dict()


def test_a_switch_is_told_with_its_step() -> None:
    told: list[tuple[str, int]] = []
    scheduler = PrecisionScheduler(POLICY, on_switch=[lambda *s: told.append(s)])
    for loss in [*CALM, SPIKE, 2.0, 2.0, 2.0]:
        scheduler.step(loss, torch.tensor(1.0))
    assert told == [("bf16", len(CALM) + 1), ("fp16", len(CALM) + 4)]


class Probe(nn.Module):
    """Remembers the type of what its layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("NaN")
        y: Tensor = self.layer(x)
        self.seen.append(y.dtype)
        return y


def test_a_model_computes_in_what_was_decided_whatever_lies_around_it() -> None:
    model, scheduler = Probe(), PrecisionScheduler(POLICY)
    handles = scheduler.attach(model, "cpu")
    x = torch.ones(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
    scheduler.step(math.nan)
    with torch.autocast("cpu", torch.float16):
        model(x)
        assert model.layer(x).dtype is torch.float16  # the outer one, untouched
    with pytest.raises(ValueError, match="NaN"):
        model(x * math.nan)
    assert not torch.is_autocast_enabled("cpu")
    for handle in handles:
        handle.remove()
    model(x)
    assert model.seen == [torch.float16, torch.bfloat16, torch.float32]


def test_fp32_is_autocast_to_nothing() -> None:
    scheduler = PrecisionScheduler(Policy(low="bf16", high="fp32"))
    scheduler.step(math.inf)
    with torch.autocast("cpu", torch.bfloat16), scheduler.autocast("cpu"):
        assert nn.Linear(3, 3)(torch.ones(2, 3)).dtype is torch.float32


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"low": "half"}, "precision is 'half'; there are: fp32, bf16, fp16, fp8"),
        ({"loss_deviation": 0.5}, "loss_deviation is 0.5; it must be a number over 1"),
        ({"gradient_ratio": math.nan}, "gradient_ratio is nan"),
        ({"run_steps": 0}, "run_steps is 0; it must be 1 or more"),
        ({"memory": 1.0}, "memory is 1; it must be 0 or more, under 1"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        PrecisionScheduler(Policy(**wrong))
