"""The endpoints of API keys, for whoever holds one with the scope `admin`.

An edit names the version it edits (`If-Match`). Rotating makes a second key beside
the first, which works on for a while, so that callers can be moved one by one. The
last key with `admin` is neither revoked nor narrowed here: the tenant would be locked
out, and only the operator's command line could help.
"""

from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Response
from pydantic import BaseModel, Field, StringConstraints

from api import audit, auth, db, etags, scopes
from api.access import DB, Caller
from api.models import ApiKey, now
from api.schemas import Body, left_out
from api.strict import StrictRoute
from api.versions import CURRENT, Version

DAY_S = 86_400
MAX_LIFE_S = 5 * 366 * DAY_S

Label = Annotated[
    str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]*$")
]
Words = Annotated[list[scopes.Word], Field(min_length=1, max_length=20)]
LifeSeconds = Annotated[int, Field(ge=60, le=MAX_LIFE_S)]
IfMatch = Annotated[str | None, Header(max_length=200)]
Cursor = Annotated[str | None, Query(max_length=200)]

router = APIRouter(prefix="/v1/api_keys", route_class=StrictRoute, tags=["keys"])


class KeyRequest(Body):
    """A key to be made. `expires_in` is seconds from now; without it, it stays.

    Requests with the key are answered in `api_version` unless they ask for another; a
    key that says none is for the one of the day it was made.
    """

    name: Label
    scopes: Words
    kind: Literal["personal", "service"] = "personal"
    expires_in: LifeSeconds | None = None
    api_version: Version = CURRENT


class KeyChange(Body):
    """What to change. `"expires_in": null` means that the key does not end."""

    name: Label = left_out("")
    scopes: Words = left_out([])
    expires_in: LifeSeconds | None = left_out(None)
    api_version: Version = left_out(CURRENT)


class Rotation(Body):
    """How long the old key works beside the new one."""

    overlap_seconds: Annotated[int, Field(ge=0, le=30 * DAY_S)] = DAY_S


class KeyView(BaseModel):
    """A key as lists show it: without the key."""

    id: str
    object: str = "api_key"
    name: str
    kind: str
    scopes: list[str]
    api_version: str
    status: Literal["active", "expired", "revoked"]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


class NewKey(KeyView):
    """A new key. `key` is shown this once."""

    key: str
    replaces: KeyView | None = None


class KeyPage(BaseModel):
    """Some keys, by id; `next_cursor` is the next page's `after`."""

    object: str = "list"
    data: list[KeyView]
    has_more: bool
    next_cursor: str | None


@router.post("", status_code=201)
def create_api_key(body: KeyRequest, caller: Caller, response: Response) -> NewKey:
    """Make a key. It is shown once; only its hash is stored."""
    row = ApiKey(
        tenant_id=caller.tenant_id,
        name=body.name,
        kind=body.kind,
        scopes=sorted(set(body.scopes)),
        api_version=body.api_version,
        expires_at=_end(body.expires_in),
    )
    with db.transaction() as session:
        key = auth.add(session, row)
        said = {"name": row.name, "scopes": row.scopes, "kind": row.kind}
        _note(session, caller, "api_key.created", row.kid, **said)
    return _new(row, key, response)


@router.get("")
def list_api_keys(
    caller: Caller,
    session: DB,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Cursor = None,
) -> KeyPage:
    """List the tenant's keys, also those that have ended."""
    rows, cursor = auth.page(session, caller.tenant_id, limit, after)
    found = [KeyView(**_fields(row)) for row in rows]
    return KeyPage(data=found, has_more=cursor is not None, next_cursor=cursor)


@router.get("/{key_id}")
def get_api_key(
    key_id: str, caller: Caller, session: DB, response: Response
) -> KeyView:
    """Show one key. Its ETag is what an edit must name."""
    return _seen(auth.get(session, caller.tenant_id, key_id), response)


@router.patch("/{key_id}")
def update_api_key(
    key_id: str,
    body: KeyChange,
    caller: Caller,
    response: Response,
    if_match: IfMatch = None,
) -> KeyView:
    """Change name, scopes, end or version of a key. It takes hold within seconds."""
    changes = _changes(body)
    with db.transaction() as session:
        row = auth.change(session, caller.tenant_id, key_id, if_match, changes)
        _note(session, caller, "api_key.updated", key_id, changed=sorted(changes))
    return _seen(row, response)


@router.post("/{key_id}/rotate", status_code=201)
def rotate_api_key(
    key_id: str, caller: Caller, response: Response, body: Rotation | None = None
) -> NewKey:
    """Make a key like this one, which works on for `overlap_seconds`."""
    overlap = timedelta(seconds=(body or Rotation()).overlap_seconds)
    with db.transaction() as session:
        new, key, old = auth.rotate(session, caller.tenant_id, key_id, overlap)
        _note(session, caller, "api_key.rotated", key_id, new=new.kid)
    return _new(new, key, response, KeyView(**_fields(old)))


@router.delete("/{key_id}", status_code=204)
def revoke_api_key(key_id: str, caller: Caller) -> None:
    """Make a key worthless, within seconds everywhere. Twice is as good as once."""
    with db.transaction() as session:
        if auth.revoke_own(session, caller.tenant_id, key_id):
            _note(session, caller, "api_key.revoked", key_id)


def _note(session: DB, caller: Caller, action: str, kid: str, **details: Any) -> None:
    audit.record(session, caller.tenant_id, caller.actor, action, kid, **details)


def _end(expires_in: int | None) -> datetime | None:
    return None if expires_in is None else now() + timedelta(seconds=expires_in)


def _changes(body: KeyChange) -> dict[str, Any]:
    """Return new values by column; what was not said stays."""
    values = {
        "name": body.name,
        "scopes": sorted(set(body.scopes)),
        "expires_in": _end(body.expires_in),
        "api_version": body.api_version,
    }
    columns = {"expires_in": "expires_at"}
    return {columns.get(name, name): values[name] for name in body.model_fields_set}


def _seen(row: ApiKey, response: Response) -> KeyView:
    response.headers["ETag"] = etags.etag(row.version)
    return KeyView(**_fields(row))


def _new(
    row: ApiKey, key: str, response: Response, replaces: KeyView | None = None
) -> NewKey:
    response.headers["ETag"] = etags.etag(row.version)
    response.headers["Location"] = f"/v1/api_keys/{row.kid}"
    return NewKey(**_fields(row), key=key, replaces=replaces)


def _fields(row: ApiKey) -> dict[str, Any]:
    return {
        "id": row.kid,
        "name": row.name,
        "kind": row.kind,
        "scopes": row.scopes if row.scopes is not None else list(scopes.EVERYDAY),
        "api_version": row.api_version or CURRENT,
        "status": auth.status(row),
        "created_at": row.created_at,
        "expires_at": row.expires_at,
        "revoked_at": row.revoked_at,
        "last_used_at": row.last_used_at,
    }
