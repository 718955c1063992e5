"""`Idempotency-Key`: a request that is sent again has its effect once.

The answer is kept in the transaction of what the request did, so that both are there
or neither is. A refusal (4xx, 5xx) did nothing and is not kept: the same key may try
again. draft-ietf-httpapi-idempotency-key-header-07.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from email.utils import format_datetime
from typing import Annotated, Any

from fastapi import Depends, Header, Request, Response
from pydantic import BaseModel
from pydantic_core import to_json
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api import auth, db
from api.access import Caller
from api.errors import (
    IdempotencyInProgress,
    IdempotencyKeyMissing,
    IdempotencyKeyReused,
    InvalidParameter,
)
from api.models import IdempotencyKey
from api.settings import settings
from api.transitions import now

HEADER = "Idempotency-Key"
SERVICE = "service"  # the kind of key that must send one
STRING = re.compile(r'"((?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])+)"\s*(?:;.*)?')
BARE = re.compile(r"[\x21\x23-\x7e]+")
MAX_KEY = 255


@dataclass(frozen=True, slots=True)
class Answer:
    """What a creating request is answered, now or again."""

    status: int
    text: bytes  # JSON
    headers: dict[str, str]
    replayed: bool = False

    def response(self) -> Response:
        """Return the HTTP response."""
        return Response(self.text, self.status, self.headers, "application/json")


def answer(
    status: int, body: BaseModel | dict[str, Any], headers: dict[str, str] | None = None
) -> Answer:
    """Return the answer with this body."""
    return Answer(status, to_json(body), headers or {})


@dataclass(frozen=True, slots=True)
class Once:
    """The promise that one request has one effect; without a key it promises nothing."""

    caller: auth.Caller
    route: str  # method and path
    key: str | None

    @property
    def tenant_id(self) -> str:
        """Return whose promise it is."""
        return self.caller.tenant_id

    def told(self, body: Any) -> Answer | None:
        """Return what was answered before, if it was: nothing need be checked then.

        Raises IdempotencyKeyReused where the body was another one.
        """
        if self.key is None:
            return None
        with db.reading() as session:
            return self._find(session, body)

    def run(self, body: Any, act: Callable[[Session], Answer]) -> Answer:
        """Act in a transaction, or return what acting came to before.

        Raises IdempotencyKeyReused, and IdempotencyInProgress where another request
        with this key is being served.
        """
        with db.transaction() as session:
            return self.act(session, body, act)

    def act(
        self, session: Session, body: Any, act: Callable[[Session], Answer]
    ) -> Answer:
        """Do as `run`, in a transaction of the caller's."""
        if self.key is None:
            return act(session)
        self._lock(session)
        return self._find(session, body) or self._keep(session, body, act(session))

    def _lock(self, session: Session) -> None:
        """Be the only one with this key until the end; SQLite has one writer anyway."""
        if session.get_bind().dialect.name != "postgresql":
            return
        name = "\n".join((self.tenant_id, self.route, str(self.key)))
        number = func.hashtextextended(name, 0)
        if not session.scalar(select(func.pg_try_advisory_xact_lock(number))):
            raise IdempotencyInProgress()

    def _find(self, session: Session, body: Any) -> Answer | None:
        place = (self.tenant_id, self.route, self.key)
        row = session.get(IdempotencyKey, place)
        if row is None or row.expires_at <= now(session):
            return None
        if row.fingerprint != fingerprint(body):
            raise IdempotencyKeyReused()
        if row.status is None:
            raise IdempotencyInProgress()
        kept = Answer(row.status, (row.body or "").encode(), dict(row.headers or {}))
        return _marked(kept, row.expires_at, replayed=True)

    def _keep(self, session: Session, body: Any, given: Answer) -> Answer:
        at = now(session)
        row = IdempotencyKey(
            tenant_id=self.tenant_id,
            route=self.route,
            key=str(self.key),
            fingerprint=fingerprint(body),
            status=given.status,
            headers=given.headers,
            body=given.text.decode(),
            created_at=at,
            expires_at=at + timedelta(seconds=settings().idempotency_s),
        )
        session.merge(row)  # one that has expired may be there
        session.flush()
        return _marked(given, row.expires_at, replayed=False)


async def once(
    request: Request,
    caller: Caller,
    idempotency_key: Annotated[
        str | None,
        Header(
            description="A string in quotes, or bare. The same key and body within a "
            "day: the same answer, and nothing is done twice. Keys of kind "
            "`service` must send it."
        ),
    ] = None,
) -> Once:
    """FastAPI dependency: what the header of this request promises. It waits for nothing,
    and needs no thread.
    """
    key = None if idempotency_key is None else parse(idempotency_key)
    if key is None and caller.kind == SERVICE:
        raise IdempotencyKeyMissing()
    return Once(caller, f"{request.method} {request.scope['path']}", key)


Idempotent = Annotated[Once, Depends(once)]


def parse(header: str) -> str:
    """Return the key in a header, RFC 8941 string or bare. Raises InvalidParameter."""
    text = header.strip()
    if match := STRING.fullmatch(text):
        key = re.sub(r"\\(.)", r"\1", match[1])
    else:
        key = text if BARE.fullmatch(text) else ""
    if not 0 < len(key) <= MAX_KEY:
        detail = f'send 1 to {MAX_KEY} printable characters, as "8e03978e-40d5"'
        raise InvalidParameter(HEADER, detail)
    return key


def fingerprint(body: Any) -> str:
    """Return a digest of JSON that does not depend on the order of its keys."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _marked(given: Answer, expires_at: datetime, *, replayed: bool) -> Answer:
    told = {
        "Idempotency-Replayed": str(replayed).lower(),
        "Idempotency-Expires": format_datetime(expires_at, usegmt=True),
    }
    return replace(given, headers={**given.headers, **told}, replayed=replayed)
