"""The endpoints of the number formats, and of any number in any of them."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel

from api.access import Caller
from api.errors import Invalid, NotFound
from api.strict import StrictRoute
from optimizer import bits
from optimizer.abilities import FORMATS as NAMED
from optimizer.bits import Kind
from optimizer.errors import SpecError
from optimizer.formats import KNOWN, Format

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["catalog"])


class FormatView(BaseModel):
    """A number format. `searchable`: a request may name it in `search.formats`.

    An integer is in two's complement and has no normal numbers; its `max` is that
    of the symmetric range. What is not `signed` has no zero either: e8m0, the scales
    of blocks.
    """

    id: str
    object: Literal["format"] = "format"
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int | None
    max: float
    smallest_normal: float | None
    smallest_subnormal: float
    eps: float | None
    has_inf: bool
    has_nan: bool
    has_negative_zero: bool
    integer: bool
    signed: bool
    searchable: bool
    links: dict[str, str]


class FormatList(BaseModel):
    """All formats, on one page."""

    object: Literal["list"] = "list"
    data: list[FormatView]
    has_more: bool = False
    next_cursor: None = None


class BitsView(BaseModel):
    """The bits of a code by field. An integer has no exponent, e8m0 nothing else."""

    sign: str
    exponent: str
    fraction: str


class InspectionView(BaseModel):
    """A number in a format; null: not finite, or it has no meaning here.

    Errors are stored - asked. `below` and `above` are the neighbors of what is
    stored, `ulp` their distance in its binade. `binades_to_overflow` is
    log2(max / |asked|), `binades_to_underflow` log2(|asked| / smallest above zero);
    both are negative beyond. `overflows`: it saturates. `flushed`: it becomes zero.
    """

    object: Literal["inspection"] = "inspection"
    format: str
    value: str
    code: str
    bits: BitsView
    kind: Kind
    stored: float | None
    exponent: int | None
    absolute_error: float | None
    relative_error: float | None
    ulp: float | None
    below: float | None
    above: float | None
    overflows: bool
    flushed: bool
    binades_to_overflow: float | None
    binades_to_underflow: float | None


@router.get("/formats")
def list_formats(caller: Caller) -> FormatList:
    """List the number formats; those that are `searchable` may be asked for."""
    return FormatList(data=[_view(found) for found in KNOWN.values()])


@router.get("/formats/{name}")
def get_format(name: str, caller: Caller) -> FormatView:
    """Return a number format: its fields, range and resolution."""
    return _view(_named(name))


@router.get("/formats/{name}/inspect")
def inspect_format(
    name: str,
    caller: Caller,
    value: Annotated[str, Query(min_length=1, max_length=bits.LONGEST)],
) -> InspectionView:
    """Look at a decimal number in a format: bits, stored value, errors, neighbors."""
    found = _named(name)
    try:
        return InspectionView(**bits.inspect(found, value).to_json())
    except SpecError as error:
        problem = Invalid("", str(error))
        problem.errors = [
            {"parameter": "value", "code": problem.code, "detail": str(error)}
        ]
        raise problem from None


def _named(name: str) -> Format:
    try:
        return bits.format_named(name)
    except SpecError as error:
        raise NotFound(str(error)) from None


def _view(found: Format) -> FormatView:
    return FormatView(
        id=found.name,
        bits=found.bits,
        exponent_bits=found.exponent_bits,
        mantissa_bits=found.mantissa_bits,
        bias=None if found.integer else found.bias,
        max=found.max,
        smallest_normal=None if found.integer else found.smallest_normal,
        smallest_subnormal=found.smallest_subnormal,
        eps=None if found.integer else found.eps,
        has_inf=found.has_inf,
        has_nan=bits.has_nan(found),
        has_negative_zero=found.has_negative_zero,
        integer=found.integer,
        signed=found.signed,
        searchable=found.name in NAMED,
        links={
            "self": f"/v1/formats/{found.name}",
            "inspect": f"/v1/formats/{found.name}/inspect?value=0.1",
        },
    )
