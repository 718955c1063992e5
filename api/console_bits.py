"""How a number in a format looks on a terminal."""

from typing import Any

from api.console import out, rows

Json = dict[str, Any]


def every(found: list[Json]) -> None:
    """Print one number in many formats."""
    title = ("format", "bits", "stored", "rel. error")
    rows(title, [_line(one) for one in found])


def _line(one: Json) -> tuple[str, ...]:
    error = one["relative_error"]
    return (
        one["format"],
        _spaced(one["bits"]),
        _stored(one) + ("" if not one["overflows"] else " (overflow)"),
        "" if error is None else f"{error:+.3g}",
    )


def one(found: Json) -> None:
    """Print one number in one format: bits by field, errors, neighbors, distances."""
    facts = {
        "bits": f"{_spaced(found['bits'])}  {found['code']}  {found['kind']}",
        "stored": _stored(found),
    }
    if found["ulp"] is not None:
        relative = found["relative_error"]
        facts["error"] = f"{found['absolute_error']:+.9g}" + (
            "" if relative is None else f", relative {relative:+.3g}"
        )
        facts["ulp"] = f"{found['ulp']:.9g}"
        facts["below"] = _neighbor(found["below"])
        facts["above"] = _neighbor(found["above"])
    if found["binades_to_overflow"] is not None:
        facts["overflow"] = f"{found['binades_to_overflow']:.4g} binades away"
        facts["underflow"] = f"{found['binades_to_underflow']:.4g} binades away"
    if found["overflows"]:
        facts["overflow"] = "beyond the largest number, saturated"
    if found["flushed"]:
        facts["underflow"] = "below half of the smallest number, flushed to zero"
    out.print(f"{found['value']} in {found['format']}")
    for name, fact in facts.items():
        out.print(f"{name:<9} {fact}")


def _spaced(bits: Json) -> str:
    return " ".join(filter(None, (bits["sign"], bits["exponent"], bits["fraction"])))


def _stored(found: Json) -> str:
    return found["kind"] if found["stored"] is None else f"{found['stored']:.17g}"


def _neighbor(value: float | None) -> str:
    return "none" if value is None else f"{value:.17g}"
