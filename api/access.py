"""Who may do what: the dependency that every endpoint of `/v1` but none else has.

A caller who was proven moments ago is known again without the database and without a
thread: most requests get through here in microseconds.
"""

from typing import Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from api import auth, db, scopes
from api.callers import verified
from api.errors import InsufficientScope

_bearer = HTTPBearer(auto_error=False, scheme_name="api_key", bearerFormat="po_live_…")


async def authenticate(
    request: Request, _: Annotated[Any, Security(_bearer)]
) -> auth.Caller:
    """Say who is calling, and that they may do this.

    Raises Unauthenticated or InsufficientScope.
    """
    token = auth.token_in(request.headers.get("authorization"))
    caller = verified.get(token)
    if caller is None:
        caller = await run_in_threadpool(_prove, token)
    required = scopes.needed(request.scope["route"].name)
    if required is not None and required not in caller.scopes:
        raise InsufficientScope(required)
    return caller


DB = Annotated[Session, Depends(db.get_session, scope="function")]
Caller = Annotated[auth.Caller, Depends(authenticate)]


def _prove(token: str) -> auth.Caller:
    with db.reading() as session:
        proof = auth.prove(session, token)
    if proof.stale:
        with db.transaction() as session:
            auth.touch(session, proof.caller)
    verified.put(token, proof)
    return proof.caller
