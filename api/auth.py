"""API keys: `po_live_<kid 8>_<secret 32>_<checksum 6>`, all in base 62.

The checksum lets secret scanners, and us, tell junk without reading the database.
Only the key's sha256 is stored: a slow hash is for passwords, not for 190 random bits.
Every query on `api_keys` is in this file.
"""

import hashlib
import hmac
import re
import secrets
import string
import threading
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from api import scopes
from api.errors import NotFound, Unauthenticated
from api.models import ApiKey, Tenant, now
from api.tenants import named as tenant_named

__all__ = ["Caller", "create_key", "tenant_named", "verified", "verify"]

BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
KEY = re.compile(r"(po_live_([0-9A-Za-z]{8})_[0-9A-Za-z]{32})_([0-9A-Za-z]{6})")
BEARER = re.compile(r"Bearer +(\S+)", re.IGNORECASE)
USED_EVERY = timedelta(minutes=1)  # `last_used_at` is this coarse: reads stay reads
KEPT_S = 5.0  # so long may a revoked key still work in a process that knew it
MAX_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, proven by a key or by a portal's token."""

    tenant_id: str
    actor: str  # a key's id, or "oidc:" and a token's subject
    kind: str  # personal, service
    scopes: frozenset[str]  # all that the words on the key stand for


@dataclass(frozen=True, slots=True)
class Proof:
    """A caller, and what else the row said."""

    caller: Caller
    expires_at: datetime | None
    stale: bool  # `last_used_at` should be written again


class Verified:
    """Callers proven in the last seconds, by the digest of what they showed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[bytes, tuple[float, Caller]] = {}

    def get(self, token: str) -> Caller | None:
        """Return who showed this token moments ago."""
        kept = self._kept.get(_digest(token))
        return kept[1] if kept and time.monotonic() < kept[0] else None

    def put(self, token: str, proof: Proof) -> None:
        """Remember a proof for `KEPT_S`, and no longer than it is good."""
        good_s = KEPT_S
        if proof.expires_at is not None:
            good_s = min(good_s, (proof.expires_at - now()).total_seconds())
        with self._lock:
            while len(self._kept) >= MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[_digest(token)] = time.monotonic() + good_s, proof.caller

    def clear(self) -> None:
        """Forget all: a key has changed."""
        with self._lock:
            self._kept.clear()


verified = Verified()


def create_key(
    session: Session,
    tenant: str,
    name: str,
    words: Iterable[str] = scopes.EVERYDAY,
    kind: str = "personal",
    expires_at: datetime | None = None,
) -> str:
    """Return a new key, which nobody can show again. The tenant is made if need be."""
    owner = tenant_named(session, tenant)
    kid, secret = _random(8), _random(32)
    key = _sealed(f"po_live_{kid}_{secret}")
    row = ApiKey(
        kid=kid,
        sha256=_sha256(key),
        tenant_id=owner.id,
        name=name,
        kind=kind,
        scopes=list(words),
        expires_at=expires_at,
    )
    session.add(row)
    session.flush()
    return key


def key_id(key: str) -> str:
    """Return the id in a key that `create_key` gave."""
    return key.split("_")[2]


def token_in(header: str | None) -> str:
    """Return what an `Authorization` header shows. Raises Unauthenticated."""
    bearer = BEARER.fullmatch(header or "")
    if bearer is None:
        raise Unauthenticated()
    return bearer[1]


def verify(session: Session, header: str | None) -> Caller:
    """Return who owns the key in an `Authorization` header.

    Raises Unauthenticated, with the same words whatever is wrong.
    """
    return prove(session, token_in(header)).caller


def prove(session: Session, key: str) -> Proof:
    """Look a key up. Raises Unauthenticated: unknown, revoked or expired."""
    match = KEY.fullmatch(key)
    if match is None or not hmac.compare_digest(_sealed(match[1]), match[0]):
        raise Unauthenticated()
    row = session.get(ApiKey, match[2])
    stored = row.sha256 if row else ""
    same = hmac.compare_digest(stored, _sha256(match[0]))  # a miss takes as long
    if row is None or not same or not _is_live(row):
        raise Unauthenticated()
    held = scopes.expand(row.scopes)
    caller = Caller(row.tenant_id, row.kid, row.kind, held)
    return Proof(caller, row.expires_at, _is_stale(row.last_used_at))


def touch(session: Session, caller: Caller) -> None:
    """Write down that the key was used."""
    used = update(ApiKey).where(ApiKey.kid == caller.actor).values(last_used_at=now())
    session.execute(used)


def grant(session: Session, kid: str) -> None:
    """Let a key of before scopes do everything: its file is the operator's own."""
    older = update(ApiKey).where(ApiKey.kid == kid, ApiKey.scopes.is_(None))
    session.execute(older.values(scopes=[scopes.ADMIN]))


def revoke(session: Session, kid: str) -> ApiKey:
    """Make a key worthless from now on. Raises NotFound."""
    row = session.get(ApiKey, kid)
    if row is None:
        raise NotFound(f"no key {kid[:16]}")
    row.revoked_at = row.revoked_at or now()
    session.flush()
    verified.clear()
    return row


def keys(session: Session) -> list[tuple[ApiKey, str]]:
    """Return every key with the name of its tenant, oldest first."""
    query = select(ApiKey, Tenant.name).join(Tenant, Tenant.id == ApiKey.tenant_id)
    return [
        (key, name) for key, name in session.execute(query.order_by(ApiKey.created_at))
    ]


def _is_live(row: ApiKey) -> bool:
    return row.revoked_at is None and (row.expires_at is None or row.expires_at > now())


def _random(length: int) -> str:
    return "".join(secrets.choice(BASE62) for _ in range(length))


def _sealed(text: str) -> str:
    checksum = zlib.crc32(text.encode())
    digits = ""
    for _ in range(6):  # 62**6 > 2**32
        checksum, digit = divmod(checksum, 62)
        digits = BASE62[digit] + digits
    return f"{text}_{digits}"


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _is_stale(used_at: datetime | None) -> bool:
    return used_at is None or now() - used_at > USED_EVERY
