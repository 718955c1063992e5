"""Who did what: rows that are only added. Every query on them is in this file."""

from typing import Any, NamedTuple

import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from api import cursors
from api.models import AuditEvent
from api.transitions import now


class Wanted(NamedTuple):
    """Which events a list has. None: it does not matter."""

    action: str | None = None
    actor: str | None = None
    target: str | None = None


ANY = Wanted()


def record(
    session: Session,
    tenant_id: str,
    actor: str,
    action: str,
    target: str | None = None,
    **details: Any,
) -> None:
    """Write down one action, in the transaction that does it.

    `action` is noun.verb in the past, as "api_key.created"; `actor` is a key's id, a
    token's subject, or "operator" on the command line. No secrets in `details`.
    """
    bound = structlog.contextvars.get_contextvars()
    event = AuditEvent(
        tenant_id=tenant_id,
        at=now(session),
        actor=actor,
        action=action,
        target=target,
        request_id=bound.get("request_id"),
        details=details,
    )
    session.add(event)
    session.flush()


def page(
    session: Session,
    tenant_id: str,
    limit: int,
    after: str | None = None,
    wanted: Wanted = ANY,
) -> tuple[list[AuditEvent], str | None]:
    """Return the newest events first, and the cursor of the next page."""
    query = select(AuditEvent).where(AuditEvent.tenant_id == tenant_id)
    for name, value in wanted._asdict().items():
        if value is not None:
            query = query.where(getattr(AuditEvent, name) == value)
    kind = f"audit:{tenant_id}"
    return cursors.page(session, query, AuditEvent.id, kind, limit, after)
