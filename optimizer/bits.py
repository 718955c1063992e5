"""Any number in any format: its bits, what is stored, and how far off that is.

    >>> from optimizer.formats import BF16
    >>> found = inspect(BF16, "0.1")
    >>> found.fields, found.stored
    (('0', '01111011', '1001101'), 0.10009765625)
    >>> found.below, found.above
    (0.099609375, 0.1005859375)

The text is read exactly, as a decimal fraction: errors are those of the format and
not of a detour through binary64. Rounding is `reference`'s: to nearest, ties to even,
overflow saturates.
"""

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from typing import Any

from optimizer.errors import SpecError
from optimizer.formats import KNOWN, Format
from optimizer.reference import decode, encode, round_to

LONGEST = 64  # characters of a number: more digits than any format tells apart
FARTHEST = 300  # decimal exponent: far beyond all formats, and within binary64's
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
_SPECIAL = re.compile(r"[+-]?(inf|infinity|nan)", re.ASCII | re.IGNORECASE)


class Kind(StrEnum):
    """What a code stands for."""

    ZERO = "zero"
    SUBNORMAL = "subnormal"
    NORMAL = "normal"
    INTEGER = "integer"
    INFINITE = "infinite"
    NAN = "nan"


@dataclass(frozen=True, slots=True)
class Inspection:
    """A number in a format. Errors are `stored - asked`; None: they have no meaning.

    `fields` are sign, exponent and fraction in binary; of an integer, which is in
    two's complement, the fraction is all but the first bit; e8m0 is all exponent.
    `exponent` is that of the binade. `overflows`: the number lies beyond the largest one by half an ulp or
    more, so it saturates. `flushed`: it is not zero and its code is.
    """

    format: Format
    value: str  # as it was written
    asked: float
    code: int
    fields: tuple[str, str, str]
    kind: Kind
    stored: float
    exponent: int | None
    absolute_error: float | None
    relative_error: float | None
    ulp: float | None
    below: float | None  # None: there is none
    above: float | None
    overflows: bool
    flushed: bool

    @property
    def binades_to_overflow(self) -> float | None:
        """log2(largest / |asked|): what it may grow by; negative beyond."""
        return self._binades(self.format.max, below=False)

    @property
    def binades_to_underflow(self) -> float | None:
        """log2(|asked| / smallest above zero): what it may shrink by."""
        return self._binades(self.format.smallest_subnormal, below=True)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON: what is not finite is null, for `kind` says which."""
        sign, exponent, fraction = self.fields
        digits = -(-self.format.bits // 4)
        return {
            "object": "inspection",
            "format": self.format.name,
            "value": self.value,
            "code": f"0x{self.code:0{digits}X}",
            "bits": {"sign": sign, "exponent": exponent, "fraction": fraction},
            "kind": str(self.kind),
            "stored": self.stored if math.isfinite(self.stored) else None,
            "exponent": self.exponent,
            "absolute_error": self.absolute_error,
            "relative_error": self.relative_error,
            "ulp": self.ulp,
            "below": self.below,
            "above": self.above,
            "overflows": self.overflows,
            "flushed": self.flushed,
            "binades_to_overflow": self.binades_to_overflow,
            "binades_to_underflow": self.binades_to_underflow,
        }

    def _binades(self, limit: float, below: bool) -> float | None:
        if self.asked == 0 or not math.isfinite(self.asked):
            return None
        ratio = math.log2(abs(self.asked)) - math.log2(limit)
        return ratio if below else -ratio


def format_named(name: str) -> Format:
    """Return the format. Raises SpecError with the closest names and all of them."""
    if name in KNOWN:
        return KNOWN[name]
    close = difflib.get_close_matches(name[:LONGEST].lower(), KNOWN, n=3, cutoff=0.5)
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    known = ", ".join(KNOWN)
    raise SpecError(f"no format {name[:LONGEST]!r}; {meant}there are: {known}")


def has_nan(fmt: Format) -> bool:
    """Whether some code of the format is NaN."""
    try:
        encode(fmt, math.nan)
    except ValueError:
        return False
    return True


def inspect(fmt: Format, text: str) -> Inspection:
    """Look at the number that `text` writes.

    Raises SpecError where it is none, and where the format has no code for it.
    """
    exact = _read(text)
    if not _has_code(fmt, exact):
        raise SpecError(f"{fmt.name} has no code for {_lacked(exact)}")
    if isinstance(exact, float):
        return _special(fmt, text, exact)
    asked = -0.0 if exact == 0 and "-" in text else float(exact)
    code = _nearest(fmt, exact, asked)
    stored = decode(fmt, code)
    error = Fraction(stored) - exact
    exponent = _exponent(fmt, stored)
    ulp = math.ldexp(1.0, exponent - fmt.mantissa_bits)
    return Inspection(
        format=fmt,
        value=text,
        asked=asked,
        code=code,
        fields=fields(fmt, code),
        kind=kind(fmt, code),
        stored=stored,
        exponent=exponent,
        absolute_error=float(error),
        relative_error=float(error / exact) if exact else None,
        ulp=ulp,
        below=_next(fmt, code, down=True),
        above=_next(fmt, code, down=False),
        overflows=abs(exact) >= Fraction(fmt.max) + Fraction(_last_ulp(fmt)) / 2,
        flushed=stored == 0 and exact != 0,
    )


def inspect_everywhere(text: str) -> list[Inspection]:
    """Look at a number in every format that has a code for it. Raises SpecError."""
    number = _read(text)
    return [inspect(f, text) for f in KNOWN.values() if _has_code(f, number)]


def _has_code(fmt: Format, number: Fraction | float) -> bool:
    if math.isnan(number):
        return has_nan(fmt)
    return fmt.signed or number > 0


def _lacked(number: Fraction | float) -> str:
    return "NaN" if math.isnan(number) else "zero or for a negative number"


def _read(text: str) -> Fraction | float:
    """Return a decimal number exactly, or inf or NaN as they are."""
    if len(text) > LONGEST:
        raise SpecError(f"a number of more than {LONGEST} characters")
    if _SPECIAL.fullmatch(text):
        return float(text)
    if not _DECIMAL.fullmatch(text):
        raise SpecError(f"{text!r} is not a decimal number such as 0.1 or -1e-5")
    number = Decimal(text)
    if number and abs(number.adjusted()) > FARTHEST:
        raise SpecError(f"{text!r} is beyond 1e±{FARTHEST}, and so beyond every format")
    return Fraction(number)


def _special(fmt: Format, text: str, asked: float) -> Inspection:
    """Inf saturates where the format has none."""
    has_code = math.isnan(asked) or fmt.has_inf
    code = (
        _infinite(fmt, asked) if math.isinf(asked) and has_code else encode(fmt, asked)
    )
    stored = decode(fmt, code)
    return Inspection(
        format=fmt,
        value=text,
        asked=asked,
        code=code,
        fields=fields(fmt, code),
        kind=kind(fmt, code),
        stored=stored,
        exponent=None,
        absolute_error=None,
        relative_error=None,
        ulp=None,
        below=None,
        above=None,
        overflows=math.isinf(asked) and not fmt.has_inf,
        flushed=False,
    )


def _infinite(fmt: Format, asked: float) -> int:
    """Infinity follows the largest number."""
    return encode(fmt, math.copysign(fmt.max, asked)) + 1


def _nearest(fmt: Format, exact: Fraction, asked: float) -> int:
    """Return the code of the nearest number. Reading `exact` as binary64 may have put
    it on a tie beside which it lies: then a neighbor is nearer.
    """
    code = encode(fmt, asked)
    if abs(exact) >= Fraction(fmt.max):
        return code
    candidates = [round_to(fmt, asked), *_neighbors(fmt, code)]
    best = min(candidates, key=lambda value: abs(Fraction(value) - exact))
    return code if best == candidates[0] else encode(fmt, best)


def _neighbors(fmt: Format, code: int) -> Iterator[float]:
    for down in (True, False):
        if (value := _next(fmt, code, down)) is not None:
            yield value


def _next(fmt: Format, code: int, down: bool) -> float | None:
    """Return the next number of the format, skipping a second zero. None: no more."""
    value = decode(fmt, code)
    if not fmt.signed and down and code == 0:
        return None
    if value == 0:
        return -fmt.smallest_subnormal if down else fmt.smallest_subnormal
    outward = (value < 0) == down
    if outward and abs(value) == fmt.max:
        return None
    if fmt.signed and not outward and abs(value) == fmt.smallest_subnormal:
        return 0.0
    if fmt.integer:
        return value - 1 if down else value + 1
    return decode(fmt, code + 1 if outward else code - 1)


def fields(fmt: Format, code: int) -> tuple[str, str, str]:
    """Return sign, exponent and fraction, in binary."""
    digits = f"{code:0{fmt.bits}b}"
    end = fmt.signed + fmt.exponent_bits
    return digits[: fmt.signed], digits[fmt.signed : end], digits[end:]


def kind(fmt: Format, code: int) -> Kind:
    """Return what the code stands for."""
    value = decode(fmt, code)
    if math.isnan(value):
        return Kind.NAN
    if math.isinf(value):
        return Kind.INFINITE
    if value == 0:
        return Kind.ZERO
    if fmt.integer:
        return Kind.INTEGER
    return Kind.SUBNORMAL if abs(value) < fmt.smallest_normal else Kind.NORMAL


def _exponent(fmt: Format, stored: float) -> int:
    """Exponent of the binade; zero and subnormals share the lowest one."""
    own = math.frexp(stored)[1] - 1 if stored else fmt.min_exponent
    return max(own, fmt.min_exponent)


def _last_ulp(fmt: Format) -> float:
    return math.ldexp(1.0, _exponent(fmt, fmt.max) - fmt.mantissa_bits)
