"""Requests that any two readers read alike, or a problem that says why not.

A query parameter that an endpoint does not have is refused by its name: a filter that
is misspelt and ignored would list what nobody asked for. Of JSON, the standard parser
takes the last of two equal keys, half of a surrogate pair, and any depth until the
stack ends. All of it is refused here, before validation. NaN and Infinity pass, so
that validation can name the field they stand in.
"""

import json
import re
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

from fastapi import Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from api.errors import (
    BodyTooLarge,
    InvalidParameter,
    MalformedJson,
    NotFound,
    UnsupportedMediaType,
)
from api.settings import settings

MAX_DEPTH = 16  # our own bodies have 3
FORBIDDEN = re.compile("[\x00\ud800-\udfff]")  # PostgreSQL and UTF-8 cannot hold them

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


class PlainRoute(APIRoute):
    """A route that answers HEAD like GET; the server drops the body."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        if self.methods and "GET" in self.methods:
            self.methods.add("HEAD")


class StrictRoute(PlainRoute):
    """A route whose path, query and JSON body are read strictly."""

    def get_route_handler(self) -> Endpoint:
        """Check what comes in, then go on as usual."""
        usual = super().get_route_handler()
        known = sorted(set(_parameters(self.dependant)))
        maps = _maps(self.openapi_extra or {})

        async def strict(request: Request) -> Response:
            _check_path(request)
            _check_query(request, known, maps)
            if self.body_field is not None:
                body = await request.body()
                if len(body) > settings().max_body_bytes:  # where files may be larger
                    raise BodyTooLarge(settings().max_body_bytes)
                if body:
                    require_json(request.headers.get("content-type", ""))
                    parse(body)
            return await usual(request)

        return strict


def _parameters(dependant: Dependant) -> Iterator[str]:
    yield from (field.alias for field in dependant.query_params)
    for inner in dependant.dependencies:
        yield from _parameters(inner)


def _maps(described: dict[str, Any]) -> list[str]:
    """Return the parameters of the form `name[key]=value`, as OpenAPI says it."""
    parameters = described.get("parameters", [])
    return [p["name"] for p in parameters if p.get("style") == "deepObject"]


def _check_path(request: Request) -> None:
    if any(FORBIDDEN.search(str(part)) for part in request.path_params.values()):
        raise NotFound("no id has such characters")


def _check_query(request: Request, known: list[str], maps: list[str]) -> None:
    for name, value in request.query_params.multi_items():
        if FORBIDDEN.search(name) or FORBIDDEN.search(value):
            raise InvalidParameter(name, "it has a NUL character")
        if name not in known and not _in_map(name, maps):
            there = [*known, *(f"{each}[key]" for each in maps)]
            listed = ", ".join(there) or "none"
            detail = f"there is no parameter {name[:80]!r}; there are: {listed}"
            raise InvalidParameter(name, detail, "unknown_parameter", there)


def _in_map(name: str, maps: list[str]) -> bool:
    prefix, bracket, rest = name.partition("[")
    return bracket == "[" and rest.endswith("]") and prefix in maps


def require_json(content_type: str) -> None:
    """Raise UnsupportedMediaType unless the header says JSON."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaType(
            f"send 'Content-Type: application/json', not {media_type[:80]!r}"
        )


def parse(body: bytes) -> Any:
    """Return the JSON value of `body`. Raises MalformedJson."""
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise MalformedJson(f"the body is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise MalformedJson(f"not JSON: {error.msg} at {where}") from None
    except RecursionError:
        raise MalformedJson("nested too deeply") from None
    except ValueError:
        raise MalformedJson("a whole number has thousands of digits") from None
    _check(value)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise MalformedJson(f"the key {twice[:80]!r} is there twice")
    return found


def _check(value: Any) -> None:
    """Refuse depth and text that the rest of the service cannot hold."""
    level = [value]
    for _ in range(MAX_DEPTH):
        texts = [t for item in level for t in _texts(item)]
        if any(FORBIDDEN.search(text) for text in texts):
            raise MalformedJson("a string has a NUL or half of a surrogate pair")
        level = [inner for item in level for inner in _inner(item)]
        if not level:
            return
    raise MalformedJson(f"nested more than {MAX_DEPTH} levels deep")


def _texts(item: Any) -> Iterable[str]:
    return item if isinstance(item, dict) else [item] if isinstance(item, str) else []


def _inner(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return item.values()
    return item if isinstance(item, list) else []
