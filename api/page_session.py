"""Sessions of the pages: a signed cookie that stands for a key or a portal's token.

A browser sends a cookie also with what another site makes it send. So a request that
changes something must show, in a header that no form of another site can set, the
token that only a page of ours was told (`X-CSRF-Token`, an HMAC of the session).
Reads need no token: the cookie is `SameSite=Lax`, and other origins cannot read the
answers. So links, downloads and event streams work as plain links.

The cookie holds the id of a key and never the key; the key is looked up again, so a
session ends with its key. A session of a portal's token ends with that token. Signing
out ends it as well, for everybody who has the cookie: its digest is kept until then.
"""

import base64
import hashlib
import hmac
import json
import secrets
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request, Response
from sqlalchemy.orm import Session as Database

from api import auth, db, scopes, secret
from api.callers import Caller, Proof, verified
from api.errors import CrossSite, Unauthenticated
from api.models import EndedSession
from api.settings import settings

PREFIX = "ps_"
HEADER = "X-CSRF-Token"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
MAX_COOKIE = 3500  # characters; browsers keep 4096 bytes with name and attributes


@dataclass(frozen=True, slots=True)
class Session:
    """Who signed in, and until when."""

    tenant_id: str
    actor: str
    scopes: tuple[str, ...]  # of a portal's token; a key's are looked up
    ends_at: float  # Unix time

    @property
    def is_of_key(self) -> bool:
        """Say whether a key signed in."""
        return not self.actor.startswith("oidc:")


def begin(proof: Proof) -> str:
    """Return the cookie's value for somebody who has just proven who they are."""
    ends_at = time.time() + settings().session_s
    if proof.expires_at is not None:
        ends_at = min(ends_at, proof.expires_at.timestamp())
    caller = proof.caller
    said: dict[str, Any] = {
        "t": caller.tenant_id,
        "a": caller.actor,
        "e": int(ends_at),
        "n": secrets.token_urlsafe(9),
    }
    if caller.actor.startswith("oidc:"):
        said["s"] = sorted(caller.scopes)
    payload = _encoded(json.dumps(said, separators=(",", ":")).encode())
    return f"{PREFIX}{payload}.{_mark('session', payload)}"


def read(value: str) -> Session:
    """Return the session in a cookie. Raises Unauthenticated: forged or over."""
    payload, _, mark = value.removeprefix(PREFIX).partition(".")
    if not value.startswith(PREFIX) or len(value) > MAX_COOKIE:
        raise Unauthenticated()
    if not hmac.compare_digest(mark.encode(), _mark("session", payload).encode()):
        raise Unauthenticated()
    said = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    found = Session(said["t"], said["a"], tuple(said.get("s", ())), said["e"])
    if found.ends_at <= time.time():
        raise Unauthenticated()
    return found


def prove(value: str) -> Proof:
    """Return who a cookie stands for now. Raises Unauthenticated."""
    found = read(value)
    with db.reading() as session:
        if session.get(EndedSession, _digest(value)) is not None:
            raise Unauthenticated()
        return _proof(session, found)


def _proof(session: Database, found: Session) -> Proof:
    ends = datetime.fromtimestamp(found.ends_at, UTC)
    if not found.is_of_key:
        held = scopes.expand(found.scopes)
        return Proof(Caller(found.tenant_id, found.actor, "personal", held), ends)
    proof = auth.prove_id(session, found.actor)
    # A person at a page repeats nothing blindly: no Idempotency-Key is asked of them.
    caller = Caller(
        proof.caller.tenant_id, found.actor, "personal", proof.caller.scopes
    )
    return Proof(caller, min(ends, proof.expires_at or ends))


def shown(request: Request) -> str | None:
    """Return the cookie of a request. None: there is none.

    Raises CrossSite where the request changes something and does not show the token.
    """
    value = request.cookies.get(_name(request))
    if value is None:
        return None
    token = request.headers.get(HEADER, "")
    good = hmac.compare_digest(token.encode("utf-8", "replace"), csrf(value).encode())
    if request.method not in SAFE and not good:
        raise CrossSite(f"send the session's token as {HEADER}; reload the page")
    return value


def csrf(value: str) -> str:
    """Return the token that a page of this session sends with every change."""
    return _mark("csrf", value)


def csrf_of(request: Request) -> str:
    """Return the token of the request's session; empty: it has none."""
    value = request.cookies.get(_name(request))
    return csrf(value) if value else ""


def keep(request: Request, response: Response, value: str) -> None:
    """Give the browser its session."""
    response.set_cookie(
        _name(request),
        value,
        max_age=max(0, int(read(value).ends_at - time.time())),
        secure=_secure(request),
        httponly=True,
        samesite="lax",
    )


def end(request: Request) -> None:
    """Make the request's session worthless, if it has one: no copy of it works on."""
    value = request.cookies.get(_name(request), "")
    try:
        ends_at = read(value).ends_at
    except Unauthenticated:
        return
    row = EndedSession(
        sha256=_digest(value), expires_at=datetime.fromtimestamp(ends_at, UTC)
    )
    with db.transaction() as session:
        session.merge(row)
    verified.clear()


def forget(request: Request, response: Response) -> None:
    """Have the browser forget its session."""
    response.delete_cookie(
        _name(request), secure=_secure(request), httponly=True, samesite="lax"
    )


def require_same_origin(request: Request) -> None:
    """Raise CrossSite where a form was sent from a page of another site.

    Signing in is what no token can guard: there is no session yet.
    """
    came_from = request.headers.get("sec-fetch-site", "same-origin")
    origin = request.headers.get("origin")
    ours = {request.headers.get("host"), urlsplit(settings().public_url).netloc}
    foreign = origin is not None and urlsplit(origin).netloc not in ours
    if came_from not in ("same-origin", "none") or foreign:
        raise CrossSite("the form was sent from another site; open it here")


def _secure(request: Request) -> bool:
    return request.url.scheme == "https" or settings().public_url.startswith("https")


def _name(request: Request) -> str:
    return "__Host-precision" if _secure(request) else "precision"


def _digest(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()


def _mark(purpose: str, text: str) -> str:
    return _encoded(secret.sign(f"pages {purpose}", text.encode()))


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
