"""The web pages: signing in, errors for people, assets. What they show is in `page_…`.

A page is read with a session (`api.page_session`) or with a bearer token that a
portal's proxy adds. Pages only read; whatever changes something is a call of the JSON
API from the page's script, with the session's token.
"""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any
from urllib.parse import parse_qs, quote, urlsplit

from fastapi import APIRouter, Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse
from starlette.concurrency import run_in_threadpool

from api import access, page_render, page_session, rates
from api.callers import Caller
from api.errors import APIError, InsufficientScope, Invalid, NotFound, Unauthenticated
from api.page_render import page
from api.strict import FORBIDDEN, PlainRoute

HOME = "/ui/jobs"
SIGN_IN = "/ui/signin"
MAX_FORM = 16_384  # bytes; a portal's token is a few thousand

NEEDED = {  # scopes, by the name of the page; None: any valid key
    "jobs_page": "jobs:read",
    "job_page": "jobs:read",
    "compare_page": "jobs:read",
    "new_page": "jobs:write",
    "models_page": "models:read",
    "model_page": "models:read",
    "datasets_page": "datasets:read",
    "hardware_page": None,
    "device_page": None,
}

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


class PageRoute(PlainRoute):
    """A route whose errors are pages, and that leads to the sign-in where need be."""

    def get_route_handler(self) -> Endpoint:
        """Answer as usual, but for errors."""
        usual = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                _require_clean(request)
                return await usual(request)
            except Unauthenticated:
                return _to_sign_in(request)
            except RequestValidationError:
                return error_page(request, Invalid("", "the address is not valid"))
            except APIError as error:
                return error_page(request, error)

        return answer


router = APIRouter(route_class=PageRoute, include_in_schema=False)
last = APIRouter(route_class=PageRoute, include_in_schema=False)  # after all others


async def visitor(request: Request) -> Caller:
    """FastAPI dependency: who reads the page, and may.

    Raises Unauthenticated, RateLimited or InsufficientScope.
    """
    caller = await access.known(request)
    request.state.visitor = caller
    name = request.scope["route"].name
    await access.count(request, caller, name)
    required = NEEDED.get(name)
    if required is not None and required not in caller.scopes:
        raise InsufficientScope(required)
    return caller


Visitor = Annotated[Caller, Depends(visitor)]


@router.get("/")
@router.get("/ui")
@router.get("/ui/")
async def home() -> Response:
    """Lead to the list of jobs."""
    return RedirectResponse(HOME, 303)


@router.get("/favicon.ico")
@router.get("/ui/assets/{version}/{name}")
async def asset(version: str = "", name: str = "mark.svg") -> Response:
    """Return a script or a style, whatever the version: an old page still works."""
    found = page_render.asset(name)
    if found is None:
        raise NotFound(f"no asset {name[:64]!r}")
    return found


@router.get(SIGN_IN)
async def sign_in_page(request: Request, next: str = HOME) -> Response:
    """Ask for a key."""
    return page(request, "signin.html.j2", None, next=_local(next), error="")


@router.post(SIGN_IN)
async def sign_in(request: Request) -> Response:
    """Begin a session for a key, or for the token of a portal."""
    page_session.require_same_origin(request)
    said = await _form(request)
    there = _local(said.get("next", HOME))
    try:
        value = await _session(request, said.get("key", "").strip())
    except APIError as error:
        words = _refusal(error)
        return page(
            request,
            "signin.html.j2",
            None,
            status=error.status,
            next=there,
            error=words,
        )
    response = RedirectResponse(there, 303)
    page_session.keep(request, response, value)
    return response


@router.post("/ui/signout")
async def sign_out(request: Request) -> Response:
    """End the session, here and in every copy of its cookie."""
    page_session.require_same_origin(request)
    await run_in_threadpool(page_session.end, request)
    response = RedirectResponse(SIGN_IN, 303)
    page_session.forget(request, response)
    return response


@last.get("/ui/{rest:path}")
async def nowhere(rest: str, visitor: Visitor) -> Response:
    """Say that there is no such page."""
    raise NotFound(f"there is no page /ui/{rest[:64]}")


def error_page(request: Request, error: APIError) -> Response:
    """Return the page of an error: what is wrong, and what to do."""
    caller = getattr(request.state, "visitor", None)
    response = page(
        request,
        "error.html.j2",
        caller,
        status=error.status,
        error=error,
        request_id=request.state.request_id,
    )
    response.headers.update(error.headers)
    return response


async def _session(request: Request, token: str) -> str:
    """Return a session. Raises Unauthenticated, RateLimited, or what the portal says."""
    counts, where = request.app.state.rates, _where(request)
    rates.require(await counts.look(counts.address, where), needed=1)
    try:
        if not token or token.startswith(page_session.PREFIX):
            raise Unauthenticated()
        proof = await run_in_threadpool(access.prove, token)
    except Unauthenticated:
        await counts.take(counts.address, where)
        raise
    value = page_session.begin(proof)
    if len(value) > page_session.MAX_COOKIE:
        raise Invalid("", "the token holds more than a session can")
    return value


def _refusal(error: APIError) -> str:
    if isinstance(error, Unauthenticated):
        return "This key is not valid. It may have been mistyped, revoked, or have expired."
    return f"{error.title}: {error.detail}."


async def _form(request: Request) -> dict[str, str]:
    """Return a form's fields. Raises Invalid where it is absurdly long."""
    body = await request.body()
    if len(body) > MAX_FORM:
        raise Invalid("", "the form is too long")
    fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
    return {name: values[0] for name, values in fields.items()}


def _to_sign_in(request: Request) -> Response:
    """Lead to the sign-in, and from there back to a page that was to be read."""
    if request.method not in page_session.SAFE:
        return RedirectResponse(SIGN_IN, 303)
    here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    response = RedirectResponse(f"{SIGN_IN}?next={quote(here, safe='')}", 303)
    page_session.forget(request, response)
    return response


def _local(address: str) -> str:
    """Return an address of a page of ours, or else home: `next` is anybody's to write."""
    parts = urlsplit(address)
    ours = not parts.scheme and not parts.netloc and address.startswith("/ui/")
    return address if ours and "\\" not in address and address.isprintable() else HOME


def _require_clean(request: Request) -> None:
    said = [*request.path_params.values(), *request.query_params.values()]
    if any(FORBIDDEN.search(str(text)) for text in said):
        raise NotFound("no page has such characters in its address")


def _where(request: Request) -> str:
    return rates.network(request.client.host if request.client else "")
