"""Sentences about sites: each follows from what was measured, and names who did it."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from optimizer.choose import Row
from optimizer.cost import SiteCost
from optimizer.formats import E4M3, FORMATS
from optimizer.metrics import sqnr_db
from optimizer.quantize import amax, fake_quantize, flushed_share, scale_from_amax
from optimizer.reasons import (
    EVEN,
    advised,
    growing,
    token_gain_db,
    why_range,
    why_token,
)
from optimizer.stack import Component, Granularity, Role, Site, choice_named
from optimizer.statistics import Layout, SiteStats
from optimizer.sums import Sensitivity
from tests.optimizer.numbers import normal

FFN = Component.FFN_IN
CHOICES = ("fp8_e4m3", "fp8_e4m3_token", "fp8_e5m2")


def seen(x: Tensor) -> SiteStats:
    stats = SiteStats()
    stats.add(x[None], ids=torch.arange(len(x))[None] + 1000)
    return stats


def error(x: Tensor, name: str) -> tuple[float, float]:
    """The loss (a mean squared error) and the SQNR of the tokens after the first, dB."""
    choice = choice_named(FFN, name)
    fmt = FORMATS[choice.input.format]
    scale = scale_from_amax(amax(x, choice.input.granularity), fmt)
    rounded = fake_quantize(x, scale, fmt)[1:]
    return float((rounded - x[1:]).square().mean()), sqnr_db(x[1:], rounded)


def measured(x: Tensor, refused: Mapping[str, str] | None = None) -> list[Row]:
    rows = []
    for name in CHOICES:
        choice, no = choice_named(FFN, name), (refused or {}).get(name)
        kl, db = error(x, name)
        loss = None if no else Sensitivity(kl, db, 0.0, 0.0)
        rows.append(Row(choice, no, loss, None if no else SiteCost(1e-6, 1e-6, 0, 0)))
    return rows


def number(said: str, after: str) -> float:
    """The number that follows some words."""
    return float(said.split(after)[1].split()[0])


def with_sink(value: float) -> Tensor:
    x = normal(512, 256)
    x[0, 7] = value
    return x


# One scale for all tokens (case B4)


@pytest.mark.parametrize(
    ("outlier", "want"),
    [
        (3e3, Granularity.TENSOR),
        (3e4, Granularity.TOKEN),
        (3e5, Granularity.TOKEN),
    ],
)
def test_token_scales_are_advised_only_where_one_scale_loses(
    outlier: float, want: Granularity
) -> None:
    # Case B4: 31.53, 28.04 and 8.48 dB with one scale, 31.67 dB with one per token.
    x = with_sink(outlier)
    stats = seen(x)
    assert advised(stats) is want
    really = error(x, "fp8_e4m3_token")[1] - error(x, "fp8_e4m3")[1]
    assert token_gain_db(stats) == pytest.approx(really, abs=0.5)


def test_the_advice_names_sink_token_and_channel() -> None:
    x = with_sink(3e5)
    said = why_token(measured(x), seen(x), {1000: "<s>"}.get)  # type: ignore[arg-type]
    assert said is not None
    for part in (
        "a value of 3e+05 of the token '<s>' at position 0",
        "in channel 7 (",
        "times the median token",
        "times the median channel",
    ):
        assert part in said
    flushed = flushed_share(x, torch.tensor(3e5 / E4M3.max), E4M3)
    assert flushed == pytest.approx(0.485, abs=5e-4)
    assert number(said, "flushes ") == pytest.approx(100 * flushed, abs=0.2)
    four, token = error(x, "fp8_e4m3")[0], error(x, "fp8_e4m3_token")[0]
    assert f"({token:.2g} nats against {four:.2g})" in said


def test_nothing_is_advised_where_one_scale_is_fine_or_no_other_exists() -> None:
    x = with_sink(3e3)
    assert why_token(measured(x), seen(x)) is None
    assert why_token(measured(x), None) is None
    far = with_sink(3e5)
    assert why_token([measured(far)[0]], seen(far)) is None


def test_a_channel_that_is_large_in_every_token_calls_for_no_token_scales() -> None:
    # As attn_qkv has them: every token's amax is the channel's, within 1.5 times.
    x = normal(512, 256)
    x[:, 7] = 20.0 * (1 + 0.25 * normal(512, seed=1).tanh())
    stats = seen(x)
    assert stats.outlier_channels()[0][2] > 5
    assert advised(stats) is Granularity.TENSOR
    assert abs(token_gain_db(stats)) < 0.2


def test_what_is_all_zero_gains_nothing() -> None:
    assert token_gain_db(seen(torch.zeros(8, 4))) == 0.0
    assert token_gain_db(SiteStats()) == 0.0


# Range or precision


def test_e5m2_loses_where_the_range_is_long_enough() -> None:
    x = normal(512, 256)
    said = why_range(measured(x), {Role.INPUT: seen(x)})
    assert said is not None
    assert said.startswith("precision-limited: e5m2 loses more than e4m3")
    four, five = error(x, "fp8_e4m3"), error(x, "fp8_e5m2")
    assert five[1] == pytest.approx(four[1] - 6.02, abs=0.2)  # one bit
    assert f"({five[0]:.2g} nats against {four[0]:.2g};" in said
    assert f"SQNR {five[1]:.1f} dB against {four[1]:.1f} dB" in said
    assert "the range is not short" in said


def test_e5m2_wins_where_one_value_leaves_the_others_no_range() -> None:
    x = with_sink(3e5)
    said = why_range(measured(x), {Role.INPUT: seen(x)})
    assert said is not None
    assert said.startswith("range-limited: e5m2 loses less than e4m3")
    spread = 3e5 / float(x.abs().median())
    assert number(said, "value is ") == pytest.approx(spread, rel=0.02)
    # In full precision are |x| from scale · 2^-6 on, or 2^-14: from 10.5, and 0.0003.
    assert number(said, "keeps ") == pytest.approx(0.0, abs=0.01)
    full = 100 * float((x.abs() >= 3e5 / 57344 * 2**-14).float().mean())
    assert number(said, "precision, e5m2 ") == pytest.approx(full, abs=0.1)


def test_what_is_flushed_and_weighs_nothing_is_said() -> None:
    # Probabilities: most are tiny, and the large ones carry the loss.
    p = (normal(64, 512) * 6).softmax(-1)
    stats = SiteStats(Layout.SCORES)
    stats.add(p[None, None])
    rows = [
        Row(choice_named(Component.ATTN_VALUES, name), None, loss, None)
        for name, loss in (
            ("fp8_e4m3", Sensitivity(1e-3, 31.0, 0.0, 0.4)),
            ("fp8_e5m2", Sensitivity(4e-3, 25.0, 0.0, 0.0)),
        )
    ]
    said = why_range(rows, {Role.INPUT: stats})
    assert said is not None
    flushed = flushed_share(p, p.max() / E4M3.max, E4M3)
    assert flushed > 0.3
    assert number(said, "flushes ") == pytest.approx(100 * flushed, abs=2.0)
    assert said.endswith("but those weigh little")


def test_the_place_that_is_flushed_most_is_the_one_that_is_named() -> None:
    x, y = normal(64, 256), with_sink(3e5)
    said = why_range(measured(y), {Role.INPUT: seen(x), Role.OUTPUT: seen(y)})
    assert said is not None
    assert "the largest output value" in said


def losses(four: float, five: float) -> list[Row]:
    return [
        Row(choice_named(FFN, n), None, Sensitivity(kl, 30.0, 0.0, 0.0), None)
        for n, kl in (("fp8_e4m3", four), ("fp8_e5m2", five))
    ]


def test_equal_losses_are_even() -> None:
    said = why_range(losses(1.0, EVEN - 0.01), {})
    assert said is not None
    assert said.startswith("even: e5m2 loses as much as e4m3")
    assert why_range(losses(0.0, 0.0), {}) is None


def test_without_statistics_the_figures_stand_alone() -> None:
    limited = why_range(losses(1.0, 2.0), {})
    assert limited is not None
    assert limited.endswith("one bit of fraction less")
    short = why_range(losses(2.0, 1.0), {Role.INPUT: seen(torch.zeros(4, 4))})
    assert short is not None
    assert short.endswith("30.0 dB)")


def test_nothing_is_said_where_e5m2_was_not_measured() -> None:
    x = normal(64, 64)
    refused = {"fp8_e5m2": "vllm loads no e5m2"}
    assert why_range(measured(x, refused), {Role.INPUT: seen(x)}) is None
    assert why_range(measured(x)[:1], {}) is None


# Length (case B5)


def places(*, jump: float) -> dict[tuple[Site, Role], SiteStats]:
    x = normal(1024, 64)
    x[512:] *= jump
    steady = normal(1024, 64, seed=1)
    return {
        (Site(3, Component.ATTN_SCORES), Role.INPUT): seen(x),
        (Site(3, FFN), Role.INPUT): seen(steady),
    }


def test_an_amax_that_grows_with_length_is_named() -> None:
    # Case B5: four times as wide after position 512, and a longer context to serve.
    (said,) = growing(places(jump=4.0), context=4096, calibrated=1024)
    assert "at layers.3.attn_scores input 4" in said
    assert "at 1024 tokens" in said
    assert "4096 tokens" in said
    assert "other places" not in said


def test_what_is_steady_or_long_enough_needs_no_warning() -> None:
    assert growing(places(jump=1.0), context=4096, calibrated=1024) == []
    assert growing(places(jump=4.0), context=1024, calibrated=1024) == []


def test_several_places_are_counted() -> None:
    some = places(jump=4.0)
    some[Site(4, FFN), Role.INPUT] = places(jump=2.0)[
        Site(3, Component.ATTN_SCORES), Role.INPUT
    ]
    (said,) = growing(some, context=4096, calibrated=1024)
    assert "and 1 other place" in said
