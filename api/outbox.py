"""What is to be told to webhook endpoints. Every query on deliveries is in this file.

A delivery is written in the transaction of what it tells, so that neither is there
without the other. Postmen take what is due: one at a time for each endpoint, so that
one which is slow keeps no other waiting. A postman who falls silent loses what he took,
and the next one sends it again under the same id: at least once, never lost.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    and_,
    bindparam,
    delete,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.orm import Session

from api import cursors, ids, webhook_bodies
from api.errors import InvalidState, NotFound
from api.models import DeliveryState, Job, WebhookDelivery, WebhookEndpoint

CLAIM_S = 60.0  # an attempt takes ten seconds at most
LOG_ENTRIES = 50  # of one delivery; the oldest go
TENANT_AT_ONCE = 4  # of one tenant's endpoints, by one postman

Event = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Letter:
    """A delivery that was taken, with all that sending it needs."""

    id: str
    tenant_id: str
    endpoint_id: str
    url: str
    secrets: tuple[str, ...]
    message_id: str
    payload: str
    attempt: int  # from 1
    at: datetime  # the database's time of this attempt
    claimed_until: datetime  # the fence: whoever takes it later changes it


class Listener(NamedTuple):
    """What is read of an endpoint to write to it."""

    id: str
    tenant_id: str
    format: str
    events: list[str]


class Attempt(NamedTuple):
    """What came of sending a letter."""

    status: int | None  # None: no answer
    error: str | None
    duration_s: float

    @property
    def arrived(self) -> bool:
        """Whether the receiver has it: any 2xx, and nothing else."""
        return self.status is not None and 200 <= self.status < 300


# -- what happens ----------------------------------------------------------------


def enqueue(
    session: Session, job: Job, first_seq: int, happened: Sequence[Event], at: datetime
) -> None:
    """Tell those who subscribed what happened to a job, in this transaction.

    The id of the message is that of the event, as `GET …/events` shows it.
    """
    told = [
        (seq, kind)
        for seq, (kind, _) in enumerate(happened, first_seq)
        if kind in webhook_bodies.SUBSCRIBABLE
    ]
    endpoints = _listening(session, job) if told else []
    if not endpoints:
        return
    for seq, kind in told:
        body = webhook_bodies.of_job(job, kind, at)
        message_id = f"evt_{job.id.removeprefix('job_')}_{seq}"
        for endpoint in endpoints:
            if kind in endpoint.events:
                add(session, endpoint, message_id, body, at, job.id)


def add(
    session: Session,
    endpoint: WebhookEndpoint | Listener,
    message_id: str,
    body: dict[str, Any],
    at: datetime,
    job_id: str | None = None,
) -> WebhookDelivery:
    """Add one event for one endpoint, due at once."""
    delivery = WebhookDelivery(
        id=ids.new("dlv"),
        tenant_id=endpoint.tenant_id,
        endpoint_id=endpoint.id,
        job_id=job_id,
        message_id=message_id,
        event_type=body["type"],
        payload=webhook_bodies.render(body, endpoint.format),
        state=DeliveryState.PENDING,
        attempts=0,
        log=[],
        next_attempt_at=at,
        created_at=at,
    )
    session.add(delivery)
    return delivery


# Made once. A shared lock: who deletes one now waits, and what we add does not dangle.
_ALL = (
    select(*(getattr(WebhookEndpoint, name) for name in Listener._fields))
    .where(WebhookEndpoint.tenant_id == bindparam("tenant"), WebhookEndpoint.enabled)
    .with_for_update(read=True, key_share=True)
)
_ONE = _ALL.where(WebhookEndpoint.id == bindparam("endpoint"))


def _listening(session: Session, job: Job) -> list[Listener]:
    which = {"tenant": job.tenant_id, "endpoint": job.webhook_endpoint_id}
    query = _ALL if job.webhook_endpoint_id is None else _ONE
    return [Listener(*row) for row in session.connection().execute(query, which)]


# -- for the owner ---------------------------------------------------------------


def _hold(session: Session, tenant_id: str, delivery_id: str) -> WebhookDelivery:
    """Return the tenant's delivery or raise NotFound, also for another tenant's.

    Nobody else changes it until the transaction ends.
    """
    query = select(WebhookDelivery).where(
        WebhookDelivery.id == delivery_id, WebhookDelivery.tenant_id == tenant_id
    )
    delivery = session.scalar(query.with_for_update())
    if delivery is None:
        raise NotFound(f"no delivery {delivery_id[:64]}")
    return delivery


def page(
    session: Session,
    endpoint: WebhookEndpoint,
    limit: int,
    after: str | None = None,
    state: DeliveryState | None = None,
) -> tuple[list[WebhookDelivery], str | None]:
    """Return the newest deliveries to an endpoint, and the cursor of the next page."""
    query = select(WebhookDelivery).where(
        WebhookDelivery.tenant_id == endpoint.tenant_id,
        WebhookDelivery.endpoint_id == endpoint.id,
    )
    if state is not None:
        query = query.where(WebhookDelivery.state == state)
    kind = f"deliveries:{endpoint.id}"
    return cursors.page(session, query, WebhookDelivery.id, kind, limit, after)


def replay(
    session: Session, tenant_id: str, delivery_id: str, at: datetime
) -> WebhookDelivery:
    """Send it once more, under the same id, and by the whole schedule again.

    Raises NotFound, and InvalidState where the endpoint is disabled.
    """
    delivery = _hold(session, tenant_id, delivery_id)
    endpoint = session.scalar(
        select(WebhookEndpoint).where(
            WebhookEndpoint.id == delivery.endpoint_id,
            WebhookEndpoint.tenant_id == tenant_id,
        )
    )
    if endpoint is None or not endpoint.enabled:
        raise InvalidState("the endpoint is disabled; enable it first")
    delivery.state = DeliveryState.PENDING
    delivery.attempts = 0
    delivery.next_attempt_at = at
    delivery.claimed_until = None  # an attempt on its way is as if it had not been
    delivery.finished_at = None
    session.flush()
    return delivery


def give_up(session: Session, endpoint_id: str, at: datetime) -> None:
    """Let what waits for an endpoint fail: it is disabled. It may be replayed."""
    session.execute(
        update(WebhookDelivery)
        .where(WebhookDelivery.endpoint_id == endpoint_id)
        .where(WebhookDelivery.state == DeliveryState.PENDING)
        .values(_closed(DeliveryState.FAILED, at))
        .execution_options(synchronize_session=False)
    )


def purge(session: Session, before: datetime) -> int:
    """Delete deliveries that ended before then, with their logs. Return how many."""
    over = and_(
        WebhookDelivery.state != DeliveryState.PENDING,
        WebhookDelivery.finished_at < before,
    )
    found = delete(WebhookDelivery).where(over).returning(WebhookDelivery.id)
    without_sync = found.execution_options(synchronize_session=False)
    return len(session.scalars(without_sync).all())


# -- for the postman -------------------------------------------------------------


def claim(
    session: Session,
    at: datetime,
    limit: int,
    busy: Collection[str] = (),
    busy_tenants: Sequence[str] = (),
) -> list[Letter]:
    """Take at most `limit` letters that are due, each for another endpoint.

    None is for an endpoint that is `busy`, and few for one tenant: `busy_tenants` has
    a tenant once for each letter of its that is on the way.
    """
    chosen = _fair(session, at, limit, busy, busy_tenants)
    if not chosen:
        return []
    query = (
        select(WebhookDelivery, WebhookEndpoint)
        .join(WebhookEndpoint, WebhookEndpoint.id == WebhookDelivery.endpoint_id)
        .where(WebhookDelivery.id.in_(chosen), _due(at))
        .with_for_update(skip_locked=True, of=WebhookDelivery)
    )
    until = at + timedelta(seconds=CLAIM_S)
    letters = []
    for delivery, endpoint in session.execute(query):
        if endpoint.enabled:
            letters.append(_taken(delivery, endpoint, at, until))
        else:  # it was written while somebody disabled the endpoint
            _change(delivery, _closed(DeliveryState.FAILED, at))
    session.flush()
    return letters


def _due(at: datetime) -> ColumnElement[bool]:
    free = or_(
        WebhookDelivery.claimed_until.is_(None), WebhookDelivery.claimed_until <= at
    )
    pending = WebhookDelivery.state == DeliveryState.PENDING
    return and_(pending, WebhookDelivery.next_attempt_at <= at, free)


def _fair(
    session: Session,
    at: datetime,
    limit: int,
    busy: Collection[str],
    busy_tenants: Sequence[str],
) -> list[str]:
    """Return the oldest due delivery of each endpoint, a few of each tenant."""
    oldest = func.min(WebhookDelivery.id)  # ids sort by time
    query = (
        select(oldest, WebhookDelivery.tenant_id)
        .where(_due(at), WebhookDelivery.endpoint_id.not_in(busy))
        .group_by(WebhookDelivery.endpoint_id, WebhookDelivery.tenant_id)
        .order_by(func.min(WebhookDelivery.next_attempt_at))
    )
    on_the_way = list(busy_tenants)
    chosen: list[str] = []
    for delivery_id, tenant_id in session.execute(query):
        if len(chosen) == limit:
            break
        if on_the_way.count(tenant_id) < TENANT_AT_ONCE:
            on_the_way.append(tenant_id)
            chosen.append(delivery_id)
    return chosen


def _taken(
    delivery: WebhookDelivery, endpoint: WebhookEndpoint, at: datetime, until: datetime
) -> Letter:
    delivery.attempts += 1  # also of an attempt that nobody lives to record
    delivery.claimed_until = until
    return Letter(
        id=delivery.id,
        tenant_id=delivery.tenant_id,
        endpoint_id=endpoint.id,
        url=endpoint.url,
        secrets=_secrets(endpoint, at),
        message_id=delivery.message_id,
        payload=delivery.payload,
        attempt=delivery.attempts,
        at=at,
        claimed_until=until,
    )


def _secrets(endpoint: WebhookEndpoint, at: datetime) -> tuple[str, ...]:
    ends_at = endpoint.old_secret_expires_at
    if endpoint.old_secret is None or ends_at is None or ends_at <= at:
        return (endpoint.secret,)
    return endpoint.secret, endpoint.old_secret


def record(
    session: Session,
    letter: Letter,
    attempt: Attempt,
    at: datetime,
    again_at: datetime | None,
) -> bool:
    """Write down what came of an attempt. False: somebody else has the letter now.

    `again_at` is when to try once more if it did not arrive; None: never.
    """
    query = (
        select(WebhookDelivery)
        .where(WebhookDelivery.id == letter.id)
        .where(WebhookDelivery.claimed_until == letter.claimed_until)
        .with_for_update()
    )
    delivery = session.scalar(query)
    if delivery is None:
        return False
    delivery.log = [*delivery.log, _entry(letter, attempt)][-LOG_ENTRIES:]
    if attempt.arrived or again_at is None:
        ended = DeliveryState.DELIVERED if attempt.arrived else DeliveryState.FAILED
        _change(delivery, _closed(ended, at))
    else:
        _change(delivery, {"next_attempt_at": again_at, "claimed_until": None})
    session.flush()
    return True


def _entry(letter: Letter, attempt: Attempt) -> dict[str, Any]:
    return {
        "at": letter.at.isoformat().replace("+00:00", "Z"),
        "status": attempt.status,
        "error": attempt.error,
        "duration_s": round(attempt.duration_s, 3),
    }


def _change(delivery: WebhookDelivery, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(delivery, name, value)


def _closed(state: DeliveryState, at: datetime) -> dict[str, Any]:
    # The index finds what ended lately: nothing else reads when it was due.
    ended = {"finished_at": at, "next_attempt_at": at, "claimed_until": None}
    return {"state": state, **ended}


# -- for whoever watches ---------------------------------------------------------


class Waiting(NamedTuple):
    """What is due and not delivered."""

    letters: int
    oldest_s: float


def waiting(session: Session, at: datetime) -> Waiting:
    """Return how many deliveries are due, and how long the first has been."""
    query = select(func.count(), func.min(WebhookDelivery.next_attempt_at)).where(
        WebhookDelivery.state == DeliveryState.PENDING,
        WebhookDelivery.next_attempt_at <= at,
    )
    count, oldest = session.execute(query).one()
    return Waiting(count, (at - oldest).total_seconds() if count else 0.0)


def ended_between(
    session: Session, since: datetime, until: datetime
) -> list[tuple[DeliveryState, list[Any]]]:
    """Return state and log of what ended after `since` and up to `until`."""
    query = select(WebhookDelivery.state, WebhookDelivery.log).where(
        WebhookDelivery.state.in_((DeliveryState.DELIVERED, DeliveryState.FAILED)),
        WebhookDelivery.next_attempt_at > since,
        WebhookDelivery.next_attempt_at <= until,
    )
    return list(session.execute(query))
