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
import zlib
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from api import cursors, scopes, tenants
from api.callers import Caller, Proof, verified
from api.errors import NotFound, Unauthenticated
from api.etags import require_match
from api.key_errors import KeyEnded, LastAdminKey
from api.models import ApiKey, Tenant, now
from api.settings import settings
from api.tenants import named as tenant_named

__all__ = ["Caller", "create_key", "tenant_named", "verify"]

BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
KEY = re.compile(
    r"(po_(?:live|test)_([0-9A-Za-z]{8})_[0-9A-Za-z]{32})_([0-9A-Za-z]{6})"
)
BEARER = re.compile(r"Bearer +(\S+)", re.IGNORECASE)
USED_EVERY = timedelta(minutes=1)  # `last_used_at` is this coarse: reads stay reads


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
    row = ApiKey(
        tenant_id=owner.id,
        name=name,
        kind=kind,
        scopes=sorted(set(words)),
        expires_at=expires_at,
    )
    return add(session, row)


def add(session: Session, row: ApiKey) -> str:
    """Give a row its id and its hash, store it and return the key."""
    row.kid, secret = _random(8), _random(32)
    key = _sealed(f"po_{settings().key_mode}_{row.kid}_{secret}")
    row.sha256 = _sha256(key)
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
    if row is None or not same or not is_live(row):
        raise Unauthenticated()
    return _proof(row)


def prove_id(session: Session, kid: str) -> Proof:
    """Return who a key stands for that was shown before. Raises Unauthenticated."""
    row = session.get(ApiKey, kid)
    if row is None or not is_live(row):
        raise Unauthenticated()
    return _proof(row)


def touch(session: Session, caller: Caller) -> None:
    """Write down that the key was used."""
    used = update(ApiKey).where(ApiKey.kid == caller.actor).values(last_used_at=now())
    session.execute(used)


# -- for a tenant's admin ------------------------------------------------------


def page(
    session: Session, tenant_id: str, limit: int, after: str | None = None
) -> tuple[list[ApiKey], str | None]:
    """Return a tenant's keys by id, and the cursor of the next page."""
    query = select(ApiKey).where(ApiKey.tenant_id == tenant_id)
    kind = f"api_keys:{tenant_id}"
    return cursors.page(session, query, ApiKey.kid, kind, limit, after, ascending=True)


def get(session: Session, tenant_id: str, kid: str) -> ApiKey:
    """Return the tenant's key. Raises NotFound, also for another tenant's."""
    query = select(ApiKey).where(ApiKey.kid == kid, ApiKey.tenant_id == tenant_id)
    row = session.scalar(query)
    if row is None:
        raise NotFound(f"no key {kid[:16]}")
    return row


def change(
    session: Session,
    tenant_id: str,
    kid: str,
    if_match: str | None,
    changes: dict[str, Any],
) -> ApiKey:
    """Change name, scopes or end of a key that is as the caller read it.

    Raises NotFound, KeyEnded, PreconditionRequired, PreconditionFailed or
    LastAdminKey.
    """
    tenants.lock(session, tenant_id)
    row = get(session, tenant_id, kid)
    _require_live(row)
    require_match(if_match, row.version)
    if scopes.ADMIN not in changes.get("scopes", [scopes.ADMIN]):
        _require_other_admin(session, row)
    for column, value in changes.items():
        setattr(row, column, value)
    row.version += 1
    session.flush()
    verified.clear()
    return row


def rotate(
    session: Session, tenant_id: str, kid: str, overlap: timedelta
) -> tuple[ApiKey, str, ApiKey]:
    """Return a new key like this one, its text, and the old one, which ends soon.

    The new one lives as long as the old one was meant to. Raises NotFound or KeyEnded.
    """
    tenants.lock(session, tenant_id)
    old, at = get(session, tenant_id, kid), now()
    _require_live(old)
    life = old.expires_at and old.expires_at - old.created_at
    new = ApiKey(
        tenant_id=tenant_id,
        name=old.name,
        kind=old.kind,
        scopes=old.scopes,
        api_version=old.api_version,
        expires_at=life and at + life,
    )
    key = add(session, new)
    ends = at + overlap
    old.expires_at = min(old.expires_at or ends, ends)
    old.version += 1
    session.flush()
    verified.clear()
    return new, key, old


def revoke_own(session: Session, tenant_id: str, kid: str) -> bool:
    """Make a tenant's key worthless. False: it was. Raises NotFound, LastAdminKey."""
    tenants.lock(session, tenant_id)
    row = get(session, tenant_id, kid)
    if row.revoked_at is not None:
        return False
    _require_other_admin(session, row)
    revoke(session, kid)
    return True


def _require_live(row: ApiKey) -> None:
    if not is_live(row):
        raise KeyEnded(status(row))


def _require_other_admin(session: Session, row: ApiKey) -> None:
    """Raise LastAdminKey where only this key could still make others."""
    if not _administers(row):
        return
    others = select(ApiKey).where(
        ApiKey.tenant_id == row.tenant_id, ApiKey.kid != row.kid
    )
    if not any(_administers(other) for other in session.scalars(others)):
        raise LastAdminKey()


def _administers(row: ApiKey) -> bool:
    return is_live(row) and scopes.ADMIN in (row.scopes or [])


# -- for the operator ----------------------------------------------------------


def grant(session: Session, kid: str) -> None:
    """Let a key of before scopes do everything: its file is the operator's own."""
    older = update(ApiKey).where(ApiKey.kid == kid, ApiKey.scopes.is_(None))
    session.execute(older.values(scopes=[scopes.ADMIN]))


def by_id(session: Session, kid: str) -> ApiKey:
    """Return any tenant's key. Raises NotFound."""
    row = session.get(ApiKey, kid)
    if row is None:
        raise NotFound(f"no key {kid[:16]}")
    return row


def revoke(session: Session, kid: str) -> ApiKey:
    """Make a key worthless from now on. Raises NotFound."""
    row = by_id(session, kid)
    row.revoked_at = row.revoked_at or now()
    row.version += 1
    session.flush()
    verified.clear()
    return row


def keys(session: Session) -> list[tuple[ApiKey, str]]:
    """Return every key with the name of its tenant, oldest first."""
    query = select(ApiKey, Tenant.name).join(Tenant, Tenant.id == ApiKey.tenant_id)
    rows = session.execute(query.order_by(ApiKey.created_at))
    return [(key, name) for key, name in rows]


def is_live(row: ApiKey) -> bool:
    """Say whether a key works now."""
    return status(row) == "active"


def status(row: ApiKey) -> str:
    """Return active, expired or revoked."""
    if row.revoked_at is not None:
        return "revoked"
    ended = row.expires_at is not None and row.expires_at <= now()
    return "expired" if ended else "active"


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


def _proof(row: ApiKey) -> Proof:
    held = scopes.expand(row.scopes)
    caller = Caller(row.tenant_id, row.kid, row.kind, held, row.api_version)
    return Proof(caller, row.expires_at, _is_stale(row.last_used_at))


def _is_stale(used_at: datetime | None) -> bool:
    return used_at is None or now() - used_at > USED_EVERY
