from dataclasses import replace

import pytest

from optimizer.break_even import break_even, pass_s, promoted
from optimizer.cost import site_cost, stack_cost
from optimizer.hardware import device
from optimizer.spec import Workload
from optimizer.stack import (
    CHOICES,
    Component,
    ModelShape,
    Site,
    Stack,
    choice_named,
)
from tests.optimizer.toy import DOWN, FFN, OUT, toy

H100, A100 = device("h100"), device("a100")


def stack(model: ModelShape, narrow: str = "fp8_e4m3", *sites: Site) -> Stack:
    return Stack(
        {
            s.site: choice_named(
                s.site.component, narrow if s.site in sites else "bf16"
            )
            for s in model.sites
        }
    )


def test_the_promoted_stack_computes_nothing_in_fp8() -> None:
    for component, choices in CHOICES.items():
        for choice in choices:
            (raised,) = promoted(Stack({Site(0, component): choice})).choices.values()
            assert not raised.input.format.startswith("fp8")
            if not choice.input.format.startswith("fp8"):  # weight-only among them
                assert raised == choice


def test_a_pass_without_overflow_is_the_fp8_pass() -> None:
    assert pass_s(0.0, 1.0, 2.0, 0.5, 64) == 1.0


def test_a_pass_pays_by_the_token_and_then_for_the_whole_batch() -> None:
    # Two tokens, each overflows every other time: 2 · ¼ of nothing, one, two.
    assert pass_s(0.5, 1.0, 9.0, 0.1, 2) == pytest.approx(1.0 + 0.5 * 0.1 + 0.25 * 0.2)
    # Five tokens that all overflow: the FP8 pass is wasted.
    assert pass_s(1.0, 1.0, 2.0, 0.5, 5) == pytest.approx(3.0)


def test_one_sequence_at_a_time_breaks_even_by_hand() -> None:
    model = toy()
    work = Workload(batch_size=1)
    narrow, wide = stack(model, "fp8_e4m3", FFN), stack(model)
    (shape,) = (s for s in model.sites if s.site == FFN)
    bf16 = wide.choices[FFN]
    row_s = site_cost(shape, bf16, H100, work, model).per_token_s
    saved_s = (
        stack_cost(model, wide, H100, work).per_token_s
        - stack_cost(model, narrow, H100, work).per_token_s
    )
    found = break_even(model, narrow, H100, work)
    # With B = 1 nothing is promoted: T8 + r · t = T16.
    assert found.per_token == pytest.approx(saved_s / row_s)
    assert 0 < found.per_token < 1
    assert found.extra_weight_bytes == shape.weight_elements * 2


def deep(layers: int) -> ModelShape:
    """The toy with its layer so many times: one matrix of many is little time."""
    model = toy()
    inner = [s for s in model.sites if s.site.layer == 0]
    return replace(
        model,
        layers=layers,
        sites=tuple(
            replace(s, site=Site(layer, s.site.component))
            for layer in range(layers)
            for s in inner
        ),
        tied_embeddings=False,
    )


def narrowed(model: ModelShape) -> Stack:
    return stack(model, "fp8_e4m3", *(s.site for s in model.sites if s.n))


def test_a_batch_breaks_even_near_the_five_percent_that_is_quoted() -> None:
    # 64 sequences, 32 layers: beyond 3 tokens the batch runs twice, 3 of 64 is 4.7 %.
    model = deep(32)
    found = break_even(model, narrowed(model), H100, Workload(batch_size=64))
    assert 0.03 < found.per_token < 0.07
    assert found.first_token < found.per_token / 100  # 64 · 512 tokens in a batch


def test_at_the_break_even_rate_a_pass_takes_as_long_as_in_16_bits() -> None:
    model, work = toy(), Workload(batch_size=64)
    narrow = stack(model, "fp8_e4m3", FFN)
    rate = break_even(model, narrow, H100, work).per_token
    (shape,) = (s for s in model.sites if s.site == FFN)
    bf16 = choice_named(Component.FFN_IN, "bf16")
    row_s = site_cost(shape, bf16, H100, Workload(1), model).per_token_s
    fp8_s, high_s = (
        stack_cost(model, s, H100, work).per_token_s for s in (narrow, promoted(narrow))
    )
    assert pass_s(rate, fp8_s, high_s, row_s, 64) == pytest.approx(high_s)


def test_nothing_overflows_where_nothing_computes_in_fp8() -> None:
    model = toy()
    for name in ("bf16", "fp8_e4m3_weight_only"):
        found = break_even(model, stack(model, name, FFN, DOWN), A100, Workload())
        assert (found.per_token, found.first_token) == (1.0, 1.0)
        assert found.extra_weight_bytes == 0


def test_fp8_that_buys_no_time_never_pays() -> None:
    # A B200 takes longer for one token of 4096×4096 in FP8 than in bf16.
    model = toy()
    found = break_even(model, stack(model, "fp8_e4m3", OUT), device("b200"), Workload())
    assert found.per_token == 0.0


def test_a_cheap_second_pass_may_pay_at_any_rate() -> None:
    # One matrix of ninety-six again costs less than FP8 saves on all of them.
    model = deep(32)
    assert break_even(model, narrowed(model), H100, Workload()).per_token == 1.0
