"""The endpoints that webhooks go to. Every query on them is in this file and `outbox`.

An endpoint where nothing arrives for days is disabled, and so is one that answers 410;
the tenant's other endpoints are told. Callers commit (`db.transaction`).
"""

import base64
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from api import audit, cursors, ids, outbox, webhook_bodies
from api.errors import Invalid, InvalidState, NotFound, QuotaExceeded
from api.models import Tenant, WebhookDelivery, WebhookEndpoint
from api.outbox import Attempt, Letter
from api.settings import settings
from api.transitions import now
from api.webhook_bodies import DEFAULT, DISABLED, TEST, Format, JobEvent
from api.webhook_urls import UrlRefused, parse

SECRET_BYTES = 32
GONE = 410
POSTMAN = "postman"  # the actor in the audit log where nobody asked


@dataclass(frozen=True, slots=True)
class Wanted:
    """An endpoint as its owner wants it."""

    url: str
    events: Sequence[JobEvent] = DEFAULT
    description: str = ""
    format: Format = Format.STANDARD


# -- for the owner ---------------------------------------------------------------


def create(
    session: Session, tenant_id: str, actor: str, wanted: Wanted
) -> WebhookEndpoint:
    """Add an endpoint with a fresh secret. Raises Invalid and QuotaExceeded."""
    url = _checked(wanted.url)
    _require_room(session, tenant_id)
    at = now(session)
    endpoint = WebhookEndpoint(
        id=ids.new("we"),
        tenant_id=tenant_id,
        url=url,
        events=_words(wanted.events),
        description=wanted.description,
        format=wanted.format.value,
        secret=_new_secret(),
        enabled=True,
        version=1,
        created_at=at,
        updated_at=at,
    )
    session.add(endpoint)
    session.flush()
    audit.record(
        session, tenant_id, actor, "webhook_endpoint.created", endpoint.id, url=url
    )
    return endpoint


def get(session: Session, tenant_id: str, endpoint_id: str) -> WebhookEndpoint:
    """Return the tenant's endpoint or raise NotFound, also for another tenant's."""
    return _found(session, _one(tenant_id, endpoint_id), endpoint_id)


def hold(session: Session, tenant_id: str, endpoint_id: str) -> WebhookEndpoint:
    """Return the endpoint; until the transaction ends nobody else changes it.

    Whoever holds an endpoint may then take its deliveries, and never the other way.
    """
    locked = _one(tenant_id, endpoint_id).with_for_update(key_share=True)
    return _found(session, locked, endpoint_id)


def page(
    session: Session, tenant_id: str, limit: int, after: str | None = None
) -> tuple[list[WebhookEndpoint], str | None]:
    """Return the newest endpoints first, and the cursor of the next page."""
    query = select(WebhookEndpoint).where(WebhookEndpoint.tenant_id == tenant_id)
    kind = f"webhook_endpoints:{tenant_id}"
    return cursors.page(session, query, WebhookEndpoint.id, kind, limit, after)


def change(
    session: Session, actor: str, endpoint: WebhookEndpoint, wanted: dict[str, Any]
) -> None:
    """Change what `wanted` names. Disabling gives up what waits; enabling forgives."""
    if not wanted:
        return
    values = dict(wanted)
    if "url" in values:
        values |= {"url": _checked(values["url"]), "failing_since": None}
    if "events" in values:
        values["events"] = _words(values["events"])
    if "format" in values:
        values["format"] = Format(values["format"]).value
    at = now(session)
    if "enabled" in values:
        values |= {"failing_since": None, "disabled_reason": None}
        if not values["enabled"]:
            outbox.give_up(session, endpoint.id, at)
    _renew(session, endpoint, at, values)
    _record(session, actor, endpoint, "changed", fields=sorted(wanted))


def rotate(session: Session, actor: str, endpoint: WebhookEndpoint) -> None:
    """Give a new secret; the one of before signs as well for a while."""
    at = now(session)
    ends_at = at + timedelta(seconds=settings().webhook_rotation_s)
    old = {"old_secret": endpoint.secret, "old_secret_expires_at": ends_at}
    _renew(session, endpoint, at, {"secret": _new_secret(), **old})
    _record(session, actor, endpoint, "rotated")


def delete(session: Session, actor: str, endpoint: WebhookEndpoint) -> None:
    """Delete an endpoint, its deliveries and their logs."""
    _record(session, actor, endpoint, "deleted", url=endpoint.url)
    session.delete(endpoint)
    session.flush()


def test(session: Session, endpoint: WebhookEndpoint) -> WebhookDelivery:
    """Send an event that means nothing by the road of all others.

    Raises InvalidState where the endpoint is disabled.
    """
    if not endpoint.enabled:
        raise InvalidState("the endpoint is disabled; enable it first")
    at = now(session)
    body = webhook_bodies.event(TEST, at, {"endpoint_id": endpoint.id})
    delivery = outbox.add(session, endpoint, ids.new("evt"), body, at)
    session.flush()
    return delivery


def _one(tenant_id: str, endpoint_id: str) -> Select[WebhookEndpoint]:
    return select(WebhookEndpoint).where(
        WebhookEndpoint.id == endpoint_id, WebhookEndpoint.tenant_id == tenant_id
    )


def _found(
    session: Session, query: Select[WebhookEndpoint], endpoint_id: str
) -> WebhookEndpoint:
    endpoint = session.scalar(query)
    if endpoint is None:
        raise NotFound(f"no webhook endpoint {endpoint_id[:64]}")
    return endpoint


def _checked(url: str) -> str:
    try:
        return parse(url).url
    except UrlRefused as refused:
        raise Invalid("/url", str(refused), code="url_refused") from None


def _require_room(session: Session, tenant_id: str) -> None:
    # Two requests at once must not both take the last place.
    place = select(Tenant.id).where(Tenant.id == tenant_id)
    session.execute(place.with_for_update(key_share=True))
    query = select(func.count()).where(WebhookEndpoint.tenant_id == tenant_id)
    used, limit = session.scalar(query) or 0, settings().webhook_max_endpoints
    if used >= limit:
        raise QuotaExceeded("webhook_endpoints", used, limit, retry_after_s=60)


def _words(events: Sequence[JobEvent]) -> list[str]:
    return sorted({JobEvent(event).value for event in events})


def _new_secret() -> str:
    random = secrets.token_bytes(SECRET_BYTES)
    return "whsec_" + base64.b64encode(random).decode()


def _renew(
    session: Session, endpoint: WebhookEndpoint, at: datetime, values: dict[str, Any]
) -> None:
    for name, value in values.items():
        setattr(endpoint, name, value)
    endpoint.version += 1
    endpoint.updated_at = at
    session.flush()


def _record(
    session: Session, actor: str, endpoint: WebhookEndpoint, verb: str, **details: Any
) -> None:
    action = f"webhook_endpoint.{verb}"
    audit.record(session, endpoint.tenant_id, actor, action, endpoint.id, **details)


# -- for the postman -------------------------------------------------------------


def note(
    session: Session,
    endpoint: WebhookEndpoint,
    letter: Letter,
    attempt: Attempt,
    at: datetime,
) -> None:
    """Remember whether anything arrives, and disable an endpoint where nothing does."""
    if not endpoint.enabled or endpoint.url != letter.url:
        return  # it changed meanwhile: what was learned is about another
    if attempt.arrived:
        endpoint.failing_since = None
        return
    endpoint.failing_since = endpoint.failing_since or letter.at
    if attempt.status == GONE:
        _disable(session, endpoint, at, "it answered 410 Gone")
    elif (failing := at - endpoint.failing_since) >= timedelta(
        seconds=settings().webhook_disable_s
    ):
        days = failing.total_seconds() / 86_400
        _disable(session, endpoint, at, f"nothing arrived for {days:.1f} days")


def _disable(
    session: Session, endpoint: WebhookEndpoint, at: datetime, reason: str
) -> None:
    _renew(session, endpoint, at, {"enabled": False, "disabled_reason": reason})
    outbox.give_up(session, endpoint.id, at)
    _record(session, POSTMAN, endpoint, "disabled", reason=reason)
    data = {"endpoint_id": endpoint.id, "url": endpoint.url, "reason": reason}
    body = webhook_bodies.event(DISABLED, at, data)
    message_id = ids.new("evt")
    others = select(WebhookEndpoint).where(
        WebhookEndpoint.tenant_id == endpoint.tenant_id,
        WebhookEndpoint.id != endpoint.id,
        WebhookEndpoint.enabled,
        WebhookEndpoint.format != Format.PORT,  # it is about no run of an action
    )
    for other in session.scalars(others):
        outbox.add(session, other, message_id, body, at)
    session.flush()
