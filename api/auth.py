"""API keys: `po_live_<kid 8>_<secret 32>_<checksum 6>`, all in base 62.

The checksum lets secret scanners, and us, tell junk without reading the database.
Only the key's sha256 is stored: a slow hash is for passwords, not for 190 random bits.
"""

import hashlib
import hmac
import re
import secrets
import string
import zlib
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from api.errors import NotFound, Unauthenticated
from api.models import ApiKey, Tenant, now

BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
KEY = re.compile(r"(po_live_([0-9A-Za-z]{8})_[0-9A-Za-z]{32})_([0-9A-Za-z]{6})")
BEARER = re.compile(r"Bearer +(\S+)", re.IGNORECASE)
USED_EVERY = timedelta(minutes=1)  # `last_used_at` is this coarse: reads stay reads


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, proven by a key."""

    tenant_id: str
    kid: str
    stale: bool  # `last_used_at` should be written again


def create_key(session: Session, tenant: str, name: str) -> str:
    """Return a new key, which nobody can show again. The tenant is made if need be."""
    kid, secret = _random(8), _random(32)
    key = _sealed(f"po_live_{kid}_{secret}")
    owner = tenant_named(session, tenant)
    session.add(ApiKey(kid=kid, sha256=_sha256(key), tenant_id=owner.id, name=name))
    session.flush()
    return key


def key_id(key: str) -> str:
    """Return the id in a key that `create_key` gave."""
    return key.split("_")[2]


def tenant_named(session: Session, name: str) -> Tenant:
    """Return the tenant, and make it if there is none of this name."""
    tenant = session.scalar(select(Tenant).where(Tenant.name == name))
    if tenant is None:
        tenant = Tenant(name=name)
        session.add(tenant)
        session.flush()
    return tenant


def verify(session: Session, header: str | None) -> Caller:
    """Return who owns the key in an `Authorization` header.

    Raises Unauthenticated, with the same words whatever is wrong.
    """
    bearer = BEARER.fullmatch(header or "")
    match = KEY.fullmatch(bearer[1]) if bearer else None
    if match is None or not hmac.compare_digest(_sealed(match[1]), match[0]):
        raise Unauthenticated()
    row = session.get(ApiKey, match[2])
    stored = row.sha256 if row else ""
    same = hmac.compare_digest(stored, _sha256(match[0]))  # a miss takes as long
    if row is None or not same or row.revoked_at is not None:
        raise Unauthenticated()
    return Caller(row.tenant_id, row.kid, _is_stale(row.last_used_at))


def touch(session: Session, caller: Caller) -> None:
    """Write down that the key was used."""
    used = update(ApiKey).where(ApiKey.kid == caller.kid).values(last_used_at=now())
    session.execute(used)


def revoke(session: Session, kid: str) -> ApiKey:
    """Make a key worthless from now on. Raises NotFound."""
    row = session.get(ApiKey, kid)
    if row is None:
        raise NotFound(f"no key {kid[:16]}")
    row.revoked_at = row.revoked_at or now()
    session.flush()
    return row


def keys(session: Session) -> list[tuple[ApiKey, str]]:
    """Return every key with the name of its tenant, oldest first."""
    query = select(ApiKey, Tenant.name).join(Tenant, Tenant.id == ApiKey.tenant_id)
    return [
        (key, name) for key, name in session.execute(query.order_by(ApiKey.created_at))
    ]


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


def _is_stale(used_at: datetime | None) -> bool:
    return used_at is None or now() - used_at > USED_EVERY
