"""The form of a JSON value, checked; what is wrong comes back as "field: why"."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

Check = Callable[[Any], str | None]  # what is wrong with a value, or None


def text(value: Any) -> str | None:
    """Want a text that says something."""
    return None if isinstance(value, str) and value.strip() else "must be a text"


def flag(value: Any) -> str | None:
    """Want true or false."""
    return None if isinstance(value, bool) else "must be true or false"


def positive(value: Any) -> str | None:
    """Want a finite number above 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = number and 0 < value < math.inf
    return None if fits else "must be a finite number above 0"


def not_negative(value: Any) -> str | None:
    """Want 0 or a finite number above."""
    zero = value == 0 and not isinstance(value, bool)
    return None if zero or not positive(value) else "must be a finite number, 0 or more"


def or_null(check: Check) -> Check:
    """Want null, or what `check` wants."""
    return lambda value: None if value is None else check(value)


def many(check: Check) -> Check:
    """Want a list of what `check` wants."""

    def every(value: Any) -> str | None:
        if not isinstance(value, list):
            return "must be a list"
        return _first((f"{i}", check(one)) for i, one in enumerate(value))

    return every


def one_of(known: Collection[str]) -> Check:
    """Want one of these texts."""

    def listed(value: Any) -> str | None:
        if isinstance(value, str) and value in known:
            return None
        return f"{value!r} is none of {', '.join(known)}"

    return listed


def table(keys: Check, values: Check) -> Check:
    """Want an object whose keys and values pass."""

    def every(value: Any) -> str | None:
        if not isinstance(value, dict):
            return "must be an object"
        return _first((key, keys(key) or values(each)) for key, each in value.items())

    return every


def record(checks: Mapping[str, Check], required: Iterable[str]) -> Check:
    """Want an object with these fields, `required` among them, and no others."""

    def every(value: Any) -> str | None:
        if not isinstance(value, dict):
            return "must be an object"
        missing = [name for name in required if name not in value]
        if missing:
            return f"{missing[0]}: is missing"
        unknown: Check = lambda _: "there is no such field"  # noqa: E731
        return _first((k, checks.get(k, unknown)(each)) for k, each in value.items())

    return every


def _first(found: Iterable[tuple[str, str | None]]) -> str | None:
    return next((f"{where}: {why}" for where, why in found if why), None)
