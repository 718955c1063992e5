"""`GET /v1/audit_events`: who did what in a tenant, for its admins."""

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict

from api import audit
from api.access import DB, Caller
from api.strict import StrictRoute

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["account"])

Word = Annotated[str | None, Query(min_length=1, max_length=128)]


class AuditView(BaseModel):
    """What somebody did. It never changes.

    `actor` is a key's id, `oidc:` and the subject of a portal's token, or `operator`;
    `action` is a noun and a verb, as `api_key.created`; `target` is the thing's id.
    """

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["audit_event"] = "audit_event"
    at: datetime
    actor: str
    action: str
    target: str | None
    request_id: str | None
    details: dict[str, Any]


class AuditPage(BaseModel):
    """Some events, the newest first; `next_cursor` is the next page's `after`."""

    object: Literal["list"] = "list"
    data: list[AuditView]
    has_more: bool
    next_cursor: str | None


@router.get("/audit_events")
def list_audit_events(
    caller: Caller,
    session: DB,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(max_length=200)] = None,
    action: Word = None,
    actor: Word = None,
    target: Word = None,
) -> AuditPage:
    """List who did what, the newest first. `jobs` have events of their own."""
    wanted = audit.Wanted(action, actor, target)
    rows, cursor = audit.page(session, caller.tenant_id, limit, after, wanted)
    found = [AuditView.model_validate(row) for row in rows]
    return AuditPage(data=found, has_more=cursor is not None, next_cursor=cursor)
