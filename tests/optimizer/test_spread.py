"""Percentiles of latency: the stated spread, and targets that name one."""

import pytest

from optimizer.errors import SpecError
from optimizer.spec import LatencySla
from optimizer.spread import P99_FIRST_TOKEN, P99_PER_TOKEN, over_median


def test_the_median_is_itself_and_the_99th_is_what_was_stated() -> None:
    assert over_median(0.5, 1.3) == 1.0
    assert over_median(0.99, 1.3) == pytest.approx(1.3)


def test_a_percentile_between_them_by_hand() -> None:
    # z of 0.9 and of 0.99 are 1.2816 and 2.3263.
    assert over_median(0.9, 1.28) == pytest.approx(1.28 ** (1.2816 / 2.3263), rel=1e-4)
    assert over_median(0.9, 1.28) == pytest.approx(1.146, abs=1e-3)


def test_a_target_without_a_percentile_is_of_the_median() -> None:
    sla = LatencySla(per_token_s=0.01)
    assert sla.percentile == 0.5
    assert sla == LatencySla.at(0.5, per_token_s=0.01)
    assert sla.asked == {"per_token_s": 0.01, "first_token_s": None}


def test_what_the_median_has_to_meet_is_less_than_a_target_at_a_percentile() -> None:
    sla = LatencySla.at(0.99, per_token_s=0.01, first_token_s=0.1)
    assert sla.per_token_s == pytest.approx(0.01 / P99_PER_TOKEN)
    assert sla.first_token_s == pytest.approx(0.1 / P99_FIRST_TOKEN)
    assert sla.percentile == 0.99
    assert sla.asked == pytest.approx({"per_token_s": 0.01, "first_token_s": 0.1})
    assert LatencySla.at(0.99).per_token_s is None


@pytest.mark.parametrize("wrong", [0.0, 0.49, 1.0, 99.0, float("nan")])
def test_a_percentile_is_a_share_from_the_median_up(wrong: float) -> None:
    with pytest.raises(SpecError, match=r"latency_sla.percentile must be a share"):
        LatencySla.at(wrong, per_token_s=0.01)
