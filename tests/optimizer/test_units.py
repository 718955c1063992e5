import math

import pytest

from optimizer import units

NBSP = "\u00a0"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.012345, "0.0123"),
        (0.0999999, "0.100"),
        (1234.5, "1,234"),  # a tie, to even
        (0.0000123, "1.23×10⁻⁵"),
        (-0.5, "−0.500"),
        (0, "0"),
        (math.inf, "∞"),
        (math.nan, "—"),
        (None, "—"),
        (True, "—"),
        ("12", "—"),
    ],
)
def test_three_digits_that_matter_and_no_whole_digit_lost(
    value: object, text: str
) -> None:
    assert units.significant(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.02, "20.0 ms"),
        (1.234e-4, "123 µs"),
        (9.999e-4, "1.00 ms"),  # rounds into the next unit
        (3e-8, "30.0 ns"),
        (75.0, "75.0 s"),
        (None, "—"),
    ],
)
def test_seconds_take_the_unit_in_which_they_read_best(
    value: object, text: str
) -> None:
    assert units.seconds(value) == text.replace(" ", NBSP)


def test_bytes_are_decimal() -> None:
    assert units.size(134_515_008) == f"135{NBSP}MB"
    assert units.size(80e9) == f"80.0{NBSP}GB"


def test_a_change_carries_its_sign() -> None:
    assert units.change(90, 100) == f"−10.0{NBSP}%"
    assert units.change(100.05, 100) == f"+0.0500{NBSP}%"
    assert units.change(1, 0) == "—"


def test_bounds_need_both_ends() -> None:
    assert units.bounds({"low": 0.01, "high": 0.02}) == "0.0100 – 0.0200"
    assert units.bounds({"low": 0.93, "high": 1}, 3, 100) == "93.0 – 100"
    assert units.bounds({"low": 0.01, "high": None}) == "—"
    assert units.bounds(None) == "—"
