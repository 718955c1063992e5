from dataclasses import replace

import pytest

from optimizer.choose import Chooser
from optimizer.stability import stability
from optimizer.stack import Stack, choice_named
from optimizer.validate import Interval, Quality
from tests.optimizer.toy import DOWN, FFN, chooser


def saturating(share: float) -> Chooser:
    """The toy, where every FP8 choice saturates this share of its elements."""
    some = chooser()
    table = {
        site: tuple(
            replace(r, sensitivity=replace(r.sensitivity, saturated=share))
            if r.sensitivity and r.choice.is_fp8
            else r
            for r in rows
        )
        for site, rows in some.table.items()
    }
    return Chooser(some.model, table, some.max_bytes)


def narrowed(some: Chooser, *sites: object) -> Stack:
    base = some.base()[1].choices
    fp8 = {s: choice_named(s.component, "fp8_e4m3") for s in base if s in sites}
    return Stack({**base, **fp8})


def test_what_is_not_narrowed_saturates_nothing() -> None:
    some = saturating(0.5)
    found = stability(some, some.base()[1])
    assert (found.saturated, found.fallback) == (0.0, 0.0)
    assert found.worst_token_kl_nats is None


def test_a_token_falls_back_where_any_of_its_elements_saturates() -> None:
    # ffn_in reads 4096 elements a token, ffn_out 8192: 1e-6 · (4096 + 8192).
    some = saturating(1e-6)
    found = stability(some, narrowed(some, FFN, DOWN))
    assert found.saturated == 1e-6
    assert found.fallback == pytest.approx(0.012288)
    assert stability(some, narrowed(some, FFN)).fallback == pytest.approx(0.004096)


def test_more_than_every_token_cannot_fall_back() -> None:
    some = saturating(0.5)
    assert stability(some, narrowed(some, FFN)).fallback == 1.0


def test_the_worst_token_and_what_falls_back_are_the_measured_ones() -> None:
    some = saturating(0.5)  # whatever the bound is
    one = Interval(1.0, 1.0, 1.0)
    found = stability(some, some.base()[1], Quality(one, one, one, 0.25, 0.1, 0.01))
    assert (found.worst_token_kl_nats, found.fallback) == (0.25, 0.01)
