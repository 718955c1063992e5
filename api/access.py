"""Who may do what, and how often: the dependency of every endpoint with a key.

A caller who was proven moments ago is known again without the database and without a
thread: most requests get through here in microseconds.
"""

from typing import Annotated, Any

from fastapi import Depends, Query, Request, Security
from fastapi.security import HTTPBearer
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from api import auth, db, page_session, rates, scopes, versions, view_tokens
from api.callers import Proof, verified
from api.errors import InsufficientScope, Unauthenticated
from api.rates import Left, Policy, Rates

ViewToken = Annotated[
    str | None,
    Query(max_length=500, description="A view token of the job, instead of a key."),
]


class Bearer(HTTPBearer):
    """The scheme of the API's description, and what asks for it: one dependency, since
    each costs every request time.
    """

    async def __call__(self, request: Request) -> auth.Caller:  # type: ignore[override]
        """Say who is calling, and that they may do this now.

        Raises Unauthenticated, RateLimited or InsufficientScope.
        """
        operation = request.scope["route"].name
        caller = await known(request)
        asked = request.headers.get(versions.HEADER)
        version = versions.answering(asked, caller.api_version)
        request.scope["state"]["api_version"] = version
        await count(request, caller, operation)
        required = scopes.needed(operation)
        if required is not None and required not in caller.scopes:
            raise InsufficientScope(required)
        return caller


class BearerOrShown(Bearer):
    """The same, or a view token of the job in the query."""

    async def __call__(  # type: ignore[override]
        self, request: Request, token: ViewToken = None
    ) -> auth.Caller:
        """Say who is calling, or whom the token stands for.

        Raises as `Bearer` does; Unauthenticated too where the token is of another job.
        """
        if token is None:
            return await super().__call__(request)
        return view_tokens.read(token, request.path_params["job_id"]).caller


_SCHEME: dict[str, Any] = {"scheme_name": "api_key", "bearerFormat": "po_live_…"}

DB = Annotated[Session, Depends(db.get_session, scope="function")]
Caller = Annotated[auth.Caller, Security(Bearer(**_SCHEME))]
Viewer = Annotated[auth.Caller, Security(BearerOrShown(**_SCHEME))]


def who(caller: auth.Caller) -> str:
    """Return whose requests are counted together: those of one key."""
    return f"{caller.tenant_id}:{caller.actor}"


async def known(request: Request) -> auth.Caller:
    """Say who is calling. Raises Unauthenticated, RateLimited or CrossSite."""
    counts: Rates = request.app.state.rates
    try:
        token = _shown(request)
        caller = verified.get(token)
        if caller is not None:
            return caller
        if not verified.knows(token):
            left = await _look(request, counts.address, _network(request))
            rates.require(left, needed=1)
        return await run_in_threadpool(_prove, token)
    except Unauthenticated:
        rates.require(await _take(request, counts.address, _network(request)))
        raise


def _network(request: Request) -> str:
    return rates.network(request.client.host if request.client else "")


async def count(request: Request, caller: auth.Caller, operation: str) -> None:
    """Count a request. Raises RateLimited where it is one too many."""
    counts: Rates = request.app.state.rates
    spent = await _take(request, counts.default, who(caller))
    rates.require(spent)
    if operation in rates.CREATES:
        rates.require(await _take(request, counts.create, who(caller)))


async def _take(request: Request, policy: Policy, whose: str) -> Left | None:
    return _told(request, await request.app.state.rates.take(policy, whose))


async def _look(request: Request, policy: Policy, whose: str) -> Left | None:
    left: Left | None = await request.app.state.rates.look(policy, whose)
    return left


def _told(request: Request, left: Left | None) -> Left | None:
    """Leave what is left where `Envelope` finds it for the answer's headers."""
    if left is not None:
        request.scope["state"].setdefault("rates", []).append(left)
    return left


def _shown(request: Request) -> str:
    """Return what the request shows: the header, or else the cookie of a page."""
    header = request.headers.get("authorization")
    if header is None and (cookie := page_session.shown(request)) is not None:
        return cookie
    token = auth.token_in(header)
    if token.startswith(page_session.PREFIX):  # of a browser, and only as its cookie
        raise Unauthenticated()
    return token


def _prove(token: str) -> auth.Caller:
    proof = prove(token)
    verified.put(token, proof)
    return proof.caller


def prove(token: str) -> Proof:
    """Return who shows a key, a portal's token or a session. Raises Unauthenticated."""
    if token.startswith(page_session.PREFIX):
        return page_session.prove(token)
    return _prove_key(token) if token.startswith("po_") else _prove_token(token)


def _prove_token(token: str) -> Proof:
    from api import oidc  # slow to import, and many installations have no portal

    return oidc.prove(token)


def _prove_key(token: str) -> Proof:
    with db.reading() as session:
        proof = auth.prove(session, token)
    if proof.stale:
        with db.transaction() as session:
            auth.touch(session, proof.caller)
    return proof
