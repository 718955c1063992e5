"""Bits are not speed: FP8 goes where it buys time, on Qwen2-7B's shapes on an H100."""

from collections import Counter
from functools import cache

import pytest

from optimizer.architectures import PUBLISHED
from optimizer.choose import Chooser
from optimizer.cost import site_cost
from optimizer.hardware import device
from optimizer.spec import LatencySla, OptimizeSpec, Workload
from optimizer.stack import (
    LINEAR,
    Choice,
    Component,
    Site,
    Stack,
    choice_named,
)
from tests.optimizer.toy import ROOM, chooser

QWEN2 = PUBLISHED["qwen2-7b"].shape
FP8 = "fp8_e4m3_token"
WIDE = (Component.FFN_IN, Component.FFN_OUT, Component.LM_HEAD)


def workload(batch: int) -> Workload:
    return Workload(batch, 512, 128)


def us(component: Component, name: str, batch: int, where: str = "h100") -> float:
    shape = next(s for s in QWEN2.sites if s.site.component is component)
    choice = choice_named(component, name)
    found = site_cost(shape, choice, device(where), workload(batch), QWEN2)
    return found.per_token_s * 1e6


def saved(component: Component, batch: int, where: str = "h100") -> float:
    """Microseconds of a decode step that FP8 saves at one site."""
    return us(component, "bf16", batch, where) - us(component, FP8, batch, where)


def test_at_one_sequence_attention_gains_nothing_and_the_rest_a_third_or_more() -> None:
    assert saved(Component.ATTN_OUT, 1) < 0
    assert 0 < saved(Component.ATTN_QKV, 1) < 0.06 * us(Component.ATTN_QKV, "bf16", 1)
    for component in WIDE:
        assert saved(component, 1) > 0.33 * us(component, "bf16", 1)


def test_at_64_sequences_it_gains_a_little_more() -> None:
    for component in (Component.ATTN_OUT, Component.ATTN_QKV):
        assert saved(component, 1) < saved(component, 64) < 3.0
    for component in WIDE:
        assert saved(component, 64) > 0.33 * us(component, "bf16", 64)


def test_on_a_b200_fp8_costs_time_wherever_the_matrix_is_small() -> None:
    for component in (Component.ATTN_OUT, Component.ATTN_QKV):
        assert saved(component, 1, "b200") < 0


def equal(site: Site, choice: Choice) -> float:
    """Every FP8 matrix loses as much; nothing else in 8 bits is to be had."""
    if choice.name == FP8 and site.component in LINEAR:
        return 1e-4
    return 1e-7 if choice.name in ("bf16", "fp32") else 1.0


@cache
def problem(batch: int) -> Chooser:
    spec = OptimizeSpec(
        "qwen2-7b", "", "0" * 64, "h100", workload=workload(batch), engine="vllm"
    )
    return chooser(equal, spec=spec, shape=QWEN2, max_bytes=ROOM)


@pytest.mark.parametrize("batch", [1, 64])
def test_the_search_takes_fp8_where_it_buys_time(batch: int) -> None:
    some = problem(batch)
    bf16 = Stack({s.site: choice_named(s.site.component, "bf16") for s in QWEN2.sites})
    gain = saved(Component.LM_HEAD, batch) + QWEN2.layers * (
        saved(Component.FFN_IN, batch) + saved(Component.FFN_OUT, batch)
    )
    # Nine tenths of what the wide matrices can give.
    target = some.totals(bf16).per_token_s - 0.9 * gain * 1e-6
    found = some.least_loss(LatencySla(per_token_s=target), ROOM)
    assert found is not None
    narrow = Counter(s.component for s, c in found.choices.items() if c.name == FP8)
    # As many losses as it takes, at the sites that give most for one.
    assert narrow[Component.FFN_IN] == QWEN2.layers
    assert narrow[Component.LM_HEAD] == 1
    assert narrow.keys() <= set(WIDE)
    assert narrow[Component.FFN_OUT] < QWEN2.layers
