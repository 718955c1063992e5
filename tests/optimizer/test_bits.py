"""The bits of a number: every code of every narrow format, and texts that are none."""

import doctest
import math
import struct
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from optimizer import bits
from optimizer.bits import Kind, format_named, has_nan, inspect, inspect_everywhere
from optimizer.errors import SpecError
from optimizer.formats import (
    BF16,
    E4M3,
    E5M2,
    E8M0,
    FORMATS,
    FP16,
    FP32,
    KNOWN,
    Format,
)
from tests.optimizer.numbers import NARROW, ORACLES

EIGHT_OR_FEWER = [fmt for fmt in [*NARROW, E8M0] if fmt.bits <= 8]
every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
every_narrow = pytest.mark.parametrize("fmt", EIGHT_OR_FEWER, ids=lambda f: f.name)


def test_the_example_in_the_docstring_is_true() -> None:
    assert doctest.testmod(bits).failed == 0


def codes(fmt: Format) -> list[tuple[int, float]]:
    """Every finite code with its value, as ml_dtypes has them."""
    every = np.arange(2**fmt.bits, dtype=np.uint8).view(ORACLES[fmt.name])
    values = every.astype(np.float64).tolist()
    return [(code, v) for code, v in enumerate(values) if math.isfinite(v)]


@every_narrow
def test_every_code_is_found_with_its_fields(fmt: Format) -> None:
    for code, value in codes(fmt):
        found = inspect(fmt, repr(value))
        assert (found.code, found.stored) == (code, value)
        assert int("".join(found.fields), 2) == code
        assert [len(f) for f in found.fields] == [
            fmt.signed,
            fmt.exponent_bits,
            fmt.mantissa_bits,
        ]
        # What Python writes of 2⁻¹²⁷ is nearest among binary64 only.
        assert abs(found.absolute_error) <= 2**-53 * abs(value) * (fmt is E8M0)
        assert not found.overflows
        assert not found.flushed
        small = abs(value) < fmt.smallest_normal
        usual = Kind.SUBNORMAL if small else Kind.NORMAL
        assert found.kind is (usual if value else Kind.ZERO)


@every_narrow
def test_neighbors_are_the_next_values(fmt: Format) -> None:
    ordered = sorted({value for _, value in codes(fmt)})
    for below, value, above in zip(
        [None, *ordered], ordered, [*ordered[1:], None], strict=False
    ):
        found = inspect(fmt, repr(value))
        assert (found.below, found.above) == (below, above)
        if above is not None and value >= 0:
            assert found.ulp == above - value


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda f: f.name)
def test_sixteen_bits_are_those_of_struct(fmt: Format) -> None:
    for code in range(0, 2**16, 7):  # every seventh: all fields take all values
        if fmt is FP16:
            (value,) = struct.unpack("<e", struct.pack("<H", code))
        else:
            (value,) = struct.unpack("<f", struct.pack("<I", code << 16))
        if math.isfinite(value):
            found = inspect(fmt, repr(value))
            assert (found.code, found.stored) == (code, value)


def test_fp32_is_numpys() -> None:
    for text in ("0.1", "-1e-45", "3.4028235e38", "16777217", "1e-39"):
        found = inspect(FP32, text)
        assert found.stored == float(np.float32(text))
        assert found.code == int(np.float32(text).view(np.uint32))


def test_one_tenth_in_bf16_by_hand() -> None:
    # 0.1 = 1.6 · 2⁻⁴, and 1.6 = 1 + 76.8/128.
    found = inspect(BF16, "0.1")
    assert found.fields == ("0", "01111011", "1001101")  # 123 - 127 = -4; 77
    assert found.stored == (1 + 77 / 128) / 16 == 0.10009765625
    assert found.exponent == -4
    assert found.ulp == 2**-11
    assert found.absolute_error == 0.2 / 128 / 16  # exactly: 0.1 is read as a decimal
    assert found.relative_error == 0.2 / 128 / 1.6
    assert found.binades_to_overflow == pytest.approx(math.log2(BF16.max / 0.1))
    assert found.binades_to_underflow == pytest.approx(133 + math.log2(0.1))


def test_a_text_is_not_rounded_twice() -> None:
    # 1.00390625 is a tie in bf16; binary64 cannot tell what lies 1e-30 above it.
    tie = "1.00390625"
    assert inspect(BF16, tie).stored == 1.0
    assert inspect(BF16, tie + "0" * 22 + "1").stored == 1.0078125
    assert inspect(BF16, "-" + tie + "0" * 22 + "1").stored == -1.0078125
    assert inspect(BF16, "1.0117187499999999999999999999999").stored == 1.0078125


def test_beyond_the_largest_number() -> None:
    # E4M3: the last ulp is 32, so up to 464 a number rounds to 448.
    assert not inspect(E4M3, "463.99").overflows
    over = inspect(E4M3, "-464")
    assert (over.overflows, over.stored, over.below) == (True, -448.0, None)
    assert over.absolute_error == 16
    assert over.binades_to_overflow == pytest.approx(math.log2(448 / 464))
    assert inspect(E5M2, "1e300").stored == 57344


def test_below_the_smallest_number() -> None:
    # E4M3: half of 2⁻⁹ is a tie, which goes to zero.
    assert inspect(E4M3, str(2**-10)).flushed
    assert inspect(E4M3, "-1e-300").fields == ("1", "0000", "000")
    kept = inspect(E4M3, "0.001")
    assert (kept.stored, kept.kind, kept.flushed) == (2**-9, Kind.SUBNORMAL, False)
    assert kept.binades_to_underflow == pytest.approx(9 + math.log2(0.001))


def test_zeros() -> None:
    found = inspect(E4M3, "0")
    assert (found.kind, found.below, found.above) == (Kind.ZERO, -(2**-9), 2**-9)
    assert found.relative_error is None
    assert found.binades_to_overflow is found.binades_to_underflow is None
    assert inspect(E4M3, "-0.0").code == 0x80
    assert inspect(FORMATS["fp8_e4m3fnuz"], "-0.0").code == 0  # 0x80 is its NaN


def test_integers_are_in_twos_complement() -> None:
    found = inspect(FORMATS["int8"], "-3.5")  # a tie: to even
    assert (found.code, found.fields) == (0xFC, ("1", "", "1111100"))
    assert (found.kind, found.stored, found.ulp) == (Kind.INTEGER, -4.0, 1.0)
    assert (found.below, found.above) == (-5.0, -3.0)
    assert inspect(FORMATS["int4"], "-7").below is None  # of the symmetric range
    assert inspect(FORMATS["int4"], "-1").above == 0


@pytest.mark.parametrize(
    ("fmt", "text", "kind", "stored"),
    [
        (FP16, "inf", Kind.INFINITE, math.inf),
        (FP16, "-Infinity", Kind.INFINITE, -math.inf),
        (E4M3, "inf", Kind.NORMAL, 448.0),
        (FORMATS["int8"], "-inf", Kind.INTEGER, -127.0),
    ],
)
def test_infinity_saturates_where_it_has_no_code(
    fmt: Format, text: str, kind: Kind, stored: float
) -> None:
    found = inspect(fmt, text)
    assert (found.kind, found.stored) == (kind, stored)
    assert found.overflows == math.isfinite(stored)
    assert found.absolute_error is found.ulp is found.binades_to_overflow is None


@every_format
def test_nan_is_a_code_or_is_refused(fmt: Format) -> None:
    if has_nan(fmt):
        found = inspect(fmt, "nan")
        assert found.kind is Kind.NAN
        assert found.to_json()["stored"] is None
    else:
        with pytest.raises(SpecError, match=f"{fmt.name} has no code for NaN"):
            inspect(fmt, "NaN")


def test_a_number_in_every_format() -> None:
    assert [one.format.name for one in inspect_everywhere("0.1")] == list(KNOWN)
    for below in ("0", "-0.1"):
        found = [one.format.name for one in inspect_everywhere(below)]
        assert found == list(FORMATS)
    with_nan = [one.format for one in inspect_everywhere("nan")]
    assert with_nan == [fmt for fmt in KNOWN.values() if has_nan(fmt)]
    assert len(with_nan) == 9  # 6 and 4 bits and integers have none


def test_scale_bytes_are_powers_of_two_as_ml_dtypes_rounds_them() -> None:
    # Not 2⁻¹²⁷, a subnormal in float32: what lies under its tie is rounded up there.
    powers = np.float32(2) ** np.arange(-126, 127, dtype=np.float32)
    between = np.float32(1.5) * powers
    up, down = np.float32(np.inf), np.float32(0)  # it goes through float32 itself
    near = [powers, np.nextafter(between, down), np.nextafter(between, up)]
    texts = [repr(value) for value in np.concatenate(near).tolist()]
    # Ties, written exactly, go to the larger: 1 is odd, 2 is even.
    texts += [str(Decimal(tie)) for tie in between[80:].tolist()]
    for text in texts:
        want = np.array([float(text)]).astype(ORACLES["e8m0"])
        found = inspect(E8M0, text)
        assert found.code == want.view(np.uint8)[0]
        assert found.stored == float(want[0])
        assert found.fields == ("", f"{found.code:08b}", "")
    beyond, tiny = inspect(E8M0, "1e300"), inspect(E8M0, "1e-300")
    assert (beyond.code, beyond.overflows, beyond.above) == (0xFE, True, None)
    assert (tiny.code, tiny.flushed, tiny.below) == (0, False, None)
    assert inspect(E8M0, "nan").code == 0xFF
    assert inspect(E8M0, "inf").code == 0xFE


@pytest.mark.parametrize("text", ["0", "-0.0", "-1", "-inf"])
def test_a_scale_is_above_zero(text: str) -> None:
    with pytest.raises(SpecError, match="e8m0 has no code for zero or for a negative"):
        inspect(E8M0, text)


@every_format
@given(data=st.data())
def test_what_is_stored_is_nearest(fmt: Format, data: Any) -> None:
    limit = int(min(fmt.max, 1e9))
    text = str(data.draw(st.decimals(-limit, limit, places=20, allow_nan=False)))
    if len(text) > bits.LONGEST:
        return
    found = inspect(fmt, text)
    exact = Fraction(Decimal(text))
    off = abs(Fraction(found.stored) - exact)
    for other in (found.below, found.above):
        assert other is None or off <= abs(Fraction(other) - exact)
    assert found.ulp is not None
    assert off <= Fraction(found.ulp) / 2 or found.overflows


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not a decimal number"),
        ("abc", "is not a decimal number"),
        ("0x39", "is not a decimal number such as 0.1"),
        ("0x1p-3", "is not a decimal number"),
        ("1_000", "is not a decimal number"),
        ("１", "is not a decimal number"),
        (" 1", "is not a decimal number"),
        ("1e", "is not a decimal number"),
        (".", "is not a decimal number"),
        ("1e999999999999", "beyond 1e±300"),
        ("1e-99999", "beyond 1e±300"),
        ("9" * 65, "more than 64 characters"),
    ],
)
def test_what_is_no_number_is_refused(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        inspect(BF16, text)


def test_zero_may_have_any_exponent() -> None:
    assert inspect(BF16, "0e999999999").kind is Kind.ZERO


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bf61", "did you mean bf16"),
        ("E4M3", "did you mean fp8_e4m3"),
        ("posit", r"'posit'; there are: fp32, tf32"),
    ],
)
def test_an_unknown_format_is_answered_with_the_closest(name: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        format_named(name)
    assert format_named("bf16") is BF16
