"""What the tests of webhooks share: endpoints, jobs that end, letters that are taken."""

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import select

from api import auth, jobs, outbox, webhook_bodies, webhooks
from api.db import reading, transaction
from api.models import WebhookDelivery, WebhookEndpoint
from api.outbox import Attempt, Letter
from api.transitions import now
from api.webhook_bodies import Format, JobEvent
from api.webhooks import Wanted
from optimizer.spec import OptimizeSpec

SPEC = OptimizeSpec("tiny", "/models/tiny", "0" * 64, "h100")
URL = "https://hooks.example.com/a"
EVERY = tuple(JobEvent)


def tenant_named(name: str) -> str:
    with transaction() as session:
        return auth.tenant_named(session, name).id


def endpoint(
    tenant: str, *events: JobEvent, url: str = URL, shape: Format = Format.STANDARD
) -> WebhookEndpoint:
    wanted = Wanted(url, events or webhook_bodies.DEFAULT, "", shape)
    with transaction() as session:
        return webhooks.create(session, tenant, "tester", wanted)


def submitted(tenant: str, body: dict[str, Any] | None = None) -> str:
    with transaction() as session:
        return jobs.submit(session, tenant, SPEC, body or {"model": "tiny"}).id


def finish(job_id: str, outcome: str = "sla_met") -> None:
    with transaction() as session:
        claim = jobs.claim(session, job_id, "worker-1")
        assert claim is not None
        assert jobs.succeed(session, claim, outcome, {})


def deliveries(endpoint_id: str) -> list[WebhookDelivery]:
    query = select(WebhookDelivery).where(WebhookDelivery.endpoint_id == endpoint_id)
    with reading() as session:
        return list(session.scalars(query.order_by(WebhookDelivery.created_at)))


def types(endpoint_id: str) -> list[str]:
    return sorted(delivery.event_type for delivery in deliveries(endpoint_id))


def take(
    limit: int = 8, busy: tuple[str, ...] = (), later: timedelta = timedelta()
) -> list[Letter]:
    with transaction() as session:
        return outbox.claim(session, now(session) + later, limit, busy)


def tell(letter: Letter, status: int | None, again_at: datetime | None = None) -> bool:
    attempt = Attempt(status, None if status else "no connection", 0.1)
    with transaction() as session:
        endpoint = session.get(WebhookEndpoint, letter.endpoint_id)
        told = outbox.record(session, letter, attempt, now(session), again_at)
        if endpoint is not None:
            webhooks.note(session, endpoint, letter, attempt, now(session))
    return told
