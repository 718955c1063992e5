import doctest
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from optimizer import reference
from optimizer.formats import E4M3, E5M2, FORMATS, Format
from optimizer.reference import (
    decode,
    decode_e8m0,
    e8m0_ceil_scale,
    e8m0_floor_scale,
    encode,
    nv_block_scale,
    round_to,
)
from tests.optimizer.numbers import NARROW, ORACLES, ties_and_neighbors

every_format = pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.name)
FP6, FP4 = FORMATS["fp6_e3m2"], FORMATS["fp4_e2m1"]


def test_the_example_in_the_docstring_is_true() -> None:
    assert doctest.testmod(reference).failed == 0


def in_range(fmt: Format) -> st.SearchStrategy[float]:
    limit = float(np.float32(fmt.max))
    return st.floats(-limit, limit, width=32)


@every_format
@given(data=st.data())
def test_agrees_with_ml_dtypes_in_range(fmt: Format, data: st.DataObject) -> None:
    x = data.draw(in_range(fmt))
    want = float(np.float32(x).astype(ORACLES[fmt.name]))
    got = round_to(fmt, x)
    assert got == want
    assert math.copysign(1, got) == math.copysign(1, want)


@every_format
def test_agrees_with_ml_dtypes_at_every_tie_and_its_neighbors(fmt: Format) -> None:
    x = ties_and_neighbors(fmt)
    x = x[np.abs(x) <= fmt.max]  # beyond, we saturate and ml_dtypes does not
    want = x.astype(ORACLES[fmt.name]).astype(np.float64)
    got = np.array([round_to(fmt, v) for v in x.tolist()])
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


@every_format
@given(x=st.floats(allow_nan=False))
def test_rounding_twice_changes_nothing(fmt: Format, x: float) -> None:
    once = round_to(fmt, x)
    assert round_to(fmt, once) == once


@every_format
@given(data=st.data())
def test_error_is_at_most_half_an_ulp(fmt: Format, data: st.DataObject) -> None:
    x = data.draw(in_range(fmt))
    half_ulp = max(abs(x) * fmt.eps, fmt.smallest_subnormal) / 2
    assert abs(round_to(fmt, x) - x) <= half_ulp


@every_format
def test_overflow_saturates(fmt: Format) -> None:
    for x in (math.nextafter(fmt.max, math.inf), 1e300, math.inf):
        assert round_to(fmt, x) == fmt.max
        assert round_to(fmt, -x) == -fmt.max


@every_format
def test_nan_stays_nan(fmt: Format) -> None:
    assert math.isnan(round_to(fmt, math.nan))


@every_format
def test_every_code_means_what_ml_dtypes_says(fmt: Format) -> None:
    codes = np.arange(1 << fmt.bits, dtype=np.uint16 if fmt.bits == 16 else np.uint8)
    with np.errstate(invalid="ignore"):  # some NaNs of bf16 are signaling
        want = codes.view(ORACLES[fmt.name]).astype(np.float64)
    got = np.array([decode(fmt, int(code)) for code in codes])
    np.testing.assert_array_equal(got, want)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.signbit(got[finite]), np.signbit(want[finite]))


@every_format
def test_every_finite_code_survives_the_round_trip(fmt: Format) -> None:
    for code in range(1 << fmt.bits):
        if math.isfinite(value := decode(fmt, code)):
            assert encode(fmt, value) == code


@pytest.mark.parametrize(
    "fmt", [f for f in NARROW if f.bits >= 8], ids=lambda f: f.name
)
def test_nan_has_a_code_where_the_format_has_one(fmt: Format) -> None:
    assert math.isnan(decode(fmt, encode(fmt, math.nan)))


@pytest.mark.parametrize("fmt", [FP6, FP4], ids=lambda f: f.name)
def test_nan_without_a_code_is_refused(fmt: Format) -> None:
    with pytest.raises(ValueError, match=fmt.name):
        encode(fmt, math.nan)


def test_infinity_has_the_code_of_the_largest_number() -> None:
    assert encode(E4M3, math.inf) == 0x7E
    assert encode(E5M2, -math.inf) == 0xFB


def test_formats_without_negative_zero_give_zero() -> None:
    fnuz = FORMATS["fp8_e4m3fnuz"]
    assert math.copysign(1, round_to(fnuz, -1e-9)) == 1
    assert encode(fnuz, -0.0) == 0  # 0x80 is its NaN
    assert math.copysign(1, round_to(E4M3, -1e-9)) == -1


# Case A5
@pytest.mark.parametrize(
    ("fmt", "x", "want"),
    [
        (E4M3, 2**-10, 0.0),  # a tie: to even
        (E4M3, math.nextafter(2**-10, 1), 2**-9),
        (E4M3, 1.5 * 2**-9, 2**-8),  # a tie: to even
        (E5M2, 2**-17, 0.0),
        (E5M2, 3 * 2**-17, 2**-15),
    ],
)
def test_subnormals_are_rounded_not_flushed(fmt: Format, x: float, want: float) -> None:
    assert round_to(fmt, x) == want


# Case A9
def test_power_of_two_scales_round_the_exponent_down_or_up() -> None:
    # 1.9 / 2^-8 = 486.4 exceeds 448; 1.9 / 2^-7 = 243.2 does not
    down, up = e8m0_floor_scale(1.9, E4M3), e8m0_ceil_scale(1.9, E4M3)
    assert (down, up) == (2**-8, 2**-7)
    assert round_to(E4M3, 1.9 / down) * down == 1.75
    assert round_to(E4M3, 1.9 / up) * up == 1.875
    assert e8m0_ceil_scale(448.0, E4M3) == 1.0  # exact powers are not rounded up


# Case A9
@pytest.mark.parametrize(
    ("amax", "exponent"), [(0.3, -2), (0.75, -1), (0.003, -9), (1.999, 0)]
)
def test_exponents_below_one_are_floored_not_truncated(
    amax: float, exponent: int
) -> None:
    unit = FORMATS["fp4_e2m1"]  # max 6 = 1.5 * 2^2
    assert e8m0_floor_scale(amax, unit) == 2.0 ** (exponent - 2)


# Case A9
def test_scale_bytes_are_powers_of_two_and_255_is_nan() -> None:
    values = [decode_e8m0(code) for code in (0, 126, 127, 134, 254)]
    assert values == [2**-127, 0.5, 1.0, 128.0, 2.0**127]
    assert math.isnan(decode_e8m0(255))


@pytest.mark.parametrize(("name", "oracle"), [("int8", np.int8), ("int4", None)])
def test_integers_are_twos_complement_and_symmetric(name: str, oracle: type) -> None:
    fmt = FORMATS[name]
    top = 2 ** (fmt.bits - 1) - 1
    assert (fmt.max, fmt.smallest_subnormal) == (top, 1.0)
    for code in range(1 << fmt.bits):
        value = decode(fmt, code)
        assert value == (code if code <= top else code - (1 << fmt.bits))
        if oracle:
            assert value == float(np.uint8(code).view(oracle))
        if value >= -top:  # the lowest code, -8 or -128, is never made
            assert encode(fmt, value) == code
    assert [round_to(fmt, v) for v in (0.5, 1.5, -2.5, 1e9, -1e9)] == [
        0.0,
        2.0,
        -2.0,
        top,
        -top,
    ]
    with pytest.raises(ValueError, match=name):
        encode(fmt, math.nan)


# Case A9
def test_a_block_scale_of_nvfp4_is_an_e4m3_number_and_never_zero() -> None:
    assert nv_block_scale(6.0, 1.0, FP4) == 1.0
    assert nv_block_scale(1.9, 1.0, FP4) == round_to(E4M3, 1.9 / 6)
    assert nv_block_scale(6 * 448.0, 1.0, FP4) == 448.0
    assert nv_block_scale(1e9, 1.0, FP4) == 448.0  # beyond calibration: saturated
    assert nv_block_scale(1e-9, 1.0, FP4) == 2**-9
    assert nv_block_scale(0.0, 1.0, FP4) == 1.0
