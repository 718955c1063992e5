import time

import pytest
import torch

from optimizer import local
from optimizer.local import REPEATS, seconds
from optimizer.spec import Workload
from optimizer.stack import CHOICES, Component, choice_named
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


def test_handing_on_another_format_than_is_read_costs_a_cast() -> None:
    casts = local.casts(tiny.loaded().shape, Workload(2, 64, 4))
    choices = {n: choice_named(Component.NORMS, n) for n in ("bf16", "fp32")}
    read = choice_named(Component.ATTN_QKV, "bf16")
    pair = next(p for p in casts.pairs if p[1].component is Component.ATTN_QKV)
    assert casts.cost_of(pair, choices["bf16"], read).per_token_s == 0.0
    cost = casts.cost_of(pair, choices["fp32"], read)
    assert cost.per_token_s > 0
    head = next(p for p in casts.pairs if p[1].component is Component.LM_HEAD)
    last = casts.cost_of(head, choices["fp32"], choice_named(Component.LM_HEAD, "bf16"))
    assert last.per_token_s == last.first_token_s  # both of two tokens, timed once
