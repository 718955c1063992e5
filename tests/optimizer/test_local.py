import time

import pytest
import torch

from optimizer import local
from optimizer.local import REPEATS, seconds
from optimizer.spec import Workload
from optimizer.stack import CHOICES, Component
from tests.optimizer import tiny


def test_the_call_that_warms_up_does_not_count() -> None:
    calls: list[int] = []

    def op() -> torch.Tensor:
        calls.append(0)
        time.sleep(0.05 if len(calls) == 1 else 0.001)
        return torch.zeros(())

    assert seconds(op) < 0.05
    assert len(calls) == 1 + REPEATS


def test_a_long_call_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LONG_S", 0.0)
    calls: list[int] = []
    seconds(lambda: torch.tensor(calls.append(0) or 0))
    assert len(calls) == 2


def test_every_choice_of_a_cpu_has_a_kernel_that_runs() -> None:
    model = tiny.loaded().shape
    device = local.device()
    cost_of = local.measured(model, device, Workload(2, 8, 4))
    wanted = {"fp32", "bf16", "fp8_e4m3_weight_only"}
    for shape in model.sites:
        component = shape.site.component
        table = {"fp8_e4m3"} if component is Component.EMBEDDINGS else set()
        for choice in CHOICES[component]:
            if choice.name in wanted | table:
                cost = cost_of(shape, choice)
                assert cost.per_token_s > 0
                assert cost.first_token_s > 0
