"""The templates of reports: everything is escaped, what is missing is shown as "—"."""

import math
from importlib import resources

from jinja2 import ChainableUndefined, Environment, FunctionLoader, Undefined

from optimizer import units

_QUANTITIES = ("bounds", "count", "nats", "seconds", "share", "significant", "size")


def environment() -> Environment:
    """Return where templates come from, with quantities as people read them."""
    found = Environment(
        loader=FunctionLoader(read),
        autoescape=True,
        undefined=ChainableUndefined,
        finalize=_or_missing,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {name: getattr(units, name) for name in _QUANTITIES}
    return found


def read(name: str) -> str:
    """Return a template or a style by the name of its file."""
    return resources.files("optimizer").joinpath("data", name).read_text("utf-8")


def _or_missing(value: object) -> object:
    if value is None or isinstance(value, Undefined):
        return units.MISSING
    return units.significant(value) if value in (math.inf, -math.inf) else value
