"""Quantities as people read them: three digits that matter, and the unit."""

import math
from collections.abc import Mapping

Ladder = tuple[tuple[float, str], ...]
MISSING = "—"
_NBSP = "\u00a0"  # a figure and its unit stay on one line
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def number(value: object) -> float | None:
    """Return `value` as a float, or None where it is no number (NaN included)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return None if math.isnan(value) else float(value)


def significant(value: object, digits: int = 3) -> str:
    """Return `value` with `digits` digits, powers of ten below 0.0001.

    Whole digits are never rounded away: 1234.5 -> 1,234; 0.012345 -> 0.0123;
    0.0000123 -> 1.23×10⁻⁵; None and NaN -> —.
    """
    x = number(value)
    if x is None:
        return MISSING
    if x == 0:
        return "0"
    if math.isinf(x):
        return "∞" if x > 0 else "−∞"
    mantissa, exponent = f"{abs(x):.{digits - 1}e}".split("e")
    power = int(exponent)
    sign = "−" if x < 0 else ""
    if power < -4:
        return f"{sign}{mantissa}×10{str(power).translate(_SUPERSCRIPTS)}"
    return f"{sign}{abs(x):,.{max(0, digits - 1 - power)}f}"


def nats(value: object) -> str:
    """0.012345 -> 0.0123 nats."""
    return _with_unit(significant(value), "nats")


def seconds(value: object) -> str:
    """0.0001234 -> 123 µs."""
    return _laddered(value, _SECONDS)


def size(value: object) -> str:
    """134515008 -> 135 MB (decimal, as data sheets count)."""
    return _laddered(value, _BYTES)


def share(value: object, digits: int = 3) -> str:
    """0.6312 -> 63.1 %."""
    x = number(value)
    return _with_unit(significant(None if x is None else 100 * x, digits), "%")


def change(value: object, reference: object) -> str:
    """Return how far `value` is from `reference`: 90 against 100 -> −10.0 %."""
    x, base = number(value), number(reference)
    if x is None or not base:
        return MISSING
    plus = "+" if x > base else ""
    return plus + share(x / base - 1)


def ratio(value: object, reference: object) -> str:
    """Return `value` over `reference`: 3 against 2 -> 1.50×."""
    x, base = number(value), number(reference)
    if x is None or not base:
        return MISSING
    return f"{significant(x / base)}×"


def count(value: object) -> str:
    """134515008 -> 134,515,008."""
    x = number(value)
    return MISSING if x is None or math.isinf(x) else f"{round(x):,}"


def bounds(interval: object, digits: int = 3, factor: float = 1.0) -> str:
    """Return the low and the high end of {"low", "high"}: 0.0118 – 0.0129."""
    if not isinstance(interval, Mapping):
        return MISSING
    ends = [number(interval.get(end)) for end in ("low", "high")]
    if None in ends:
        return MISSING
    return " – ".join(significant(e and e * factor, digits) for e in ends)


def seconds_unit(value: float) -> tuple[float, str]:
    """Return the factor and the unit in which `value` reads best: (1e-6, "µs")."""
    return _rung(value, _SECONDS)


def _rung(value: float, ladder: Ladder) -> tuple[float, str]:
    rounded = float(f"{abs(value):.2e}")  # 999.9 µs reads as 1.00 ms
    for factor, unit in ladder:
        if rounded >= factor:
            return factor, unit
    return ladder[-1]


def _laddered(value: object, ladder: Ladder) -> str:
    x = number(value)
    if x is None or math.isinf(x):
        return significant(x)
    factor, unit = _rung(x, ladder) if x else ladder[len(ladder) // 2]
    return _with_unit(significant(x / factor), unit)


def _with_unit(text: str, unit: str) -> str:
    return text if text == MISSING else f"{text}{_NBSP}{unit}"
