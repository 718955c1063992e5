"""Whose turn it is: who may queue one more job, and which one a free worker takes.

The tenant with the fewest running jobs comes first, then the one that was served
longest ago; within a tenant priority decides, then the deadline, then age. So a flood
from one tenant does not hold up another, and no bell decides on the order.
"""

from collections.abc import Collection
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Subquery,
    and_,
    bindparam,
    exists,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.orm import Session
from sqlalchemy.sql.elements import SQLCoreOperations

from api import queue
from api.errors import QuotaExceeded
from api.models import HELD, Job, Status, Tenant, WebhookEndpoint
from api.settings import settings
from api.transitions import CLOCKS, moment, now

CLAIMING = 0x70726563  # the advisory lock of PostgreSQL under which jobs are claimed
RETRY_AFTER_S = 30  # a queue of long jobs moves slowly; a guess for callers

# Made once: building them takes longer than running them.
_LOCK = (
    select(Tenant.id)
    .where(Tenant.id == bindparam("tenant"))
    .with_for_update(key_share=True)
)
_QUEUED = (
    select(func.count())
    .select_from(Job)
    .where(Job.tenant_id == bindparam("tenant"), Job.status == Status.QUEUED)
    .scalar_subquery()
)
_LISTENERS = exists().where(
    WebhookEndpoint.tenant_id == bindparam("tenant"), WebhookEndpoint.enabled
)
_STANDING = {
    name: select(clock, Tenant.max_queued, _QUEUED, _LISTENERS).where(
        Tenant.id == bindparam("tenant")
    )
    for name, clock in CLOCKS.items()
}


class Admission(NamedTuple):
    """What one look at the database says before a job is written."""

    at: datetime
    heard: bool  # some endpoint of the tenant may want to know


def admit(connection: Connection, tenant_id: str) -> Admission:
    """Let the tenant queue one more job. Raises QuotaExceeded.

    Until the transaction ends, no other one of the tenant's is let in.
    """
    which, dialect = {"tenant": tenant_id}, connection.dialect.name
    if dialect == "postgresql":  # before the count, which then sees who held the lock
        connection.execute(_LOCK, which)
    at, own, queued, heard = connection.execute(_STANDING[dialect], which).one()
    limit = settings().max_queued if own is None else own
    if queued >= limit:
        raise QuotaExceeded("queued_jobs", queued, limit, RETRY_AFTER_S)
    return Admission(moment(at), heard)


def serialize(session: Session) -> None:
    """Let one transaction at a time claim: the counts that decide must not change.

    SQLite has one writer anyway.
    """
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock(CLAIMING)))


def claimable(at: datetime, queues: Collection[str]) -> Select[str]:
    """Return the query for the job that a worker of these queues takes next.

    It locks the row; those that somebody else is changing are passed over.
    """
    return _first(at, queues).with_for_update(of=Job, skip_locked=True)


def waits(session: Session, queues: Collection[str]) -> Job | None:
    """Return the job that a worker of these queues could take now, and lock nothing."""
    job_id = session.scalar(_first(now(session), queues))
    return None if job_id is None else session.get(Job, job_id)


def served(session: Session, tenant_id: str, at: datetime) -> None:
    """Write down that a worker took a job of the tenant."""
    now_served = update(Tenant).where(Tenant.id == tenant_id).values(served_at=at)
    session.execute(now_served.execution_options(synchronize_session=False))


def places(session: Session, own: str) -> dict[str, int]:
    """Return the place of every job that waits in a queue, from 1: when it would start.

    It is a forecast: jobs that come later may go first.
    """
    running = _running()
    own_order = func.row_number().over(
        partition_by=Job.tenant_id, order_by=_within_a_tenant()
    )
    # The first job of everybody else comes before my second, and running ones count.
    turn = own_order + func.coalesce(running.c.count, 0)
    query = (
        select(Job.id)
        .join(Tenant, Tenant.id == Job.tenant_id)
        .outerjoin(running, running.c.tenant_id == Job.tenant_id)
        .where(ready(now(session)), rung_in([own]))
        .order_by(turn, Tenant.served_at.nulls_first(), Job.tenant_id)
    )
    return {job_id: place for place, job_id in enumerate(session.scalars(query), 1)}


def ready(at: datetime) -> ColumnElement[bool]:
    """The job waits for a worker, and not too long: one that ran already goes on."""
    return and_(Job.status == Status.QUEUED, ~late(at))


def late(at: datetime) -> ColumnElement[bool]:
    """The job should have been started by now, and was not."""
    return and_(Job.expires_at <= at, Job.started_at.is_(None))


def rung_in(queues: Collection[str]) -> ColumnElement[bool]:
    """The job's bell rings in one of these queues, or would, were it set up."""
    named = [own for name in queues if (own := queue.hardware_of(name))]
    rest = Job.hardware.not_in(settings().hardware_queues)
    chosen = Job.hardware.in_(named)
    return or_(chosen, rest) if queue.DEFAULT in queues else chosen


def _first(at: datetime, queues: Collection[str]) -> Select[str]:
    running = _running()
    held = func.coalesce(running.c.count, 0)
    limit = func.coalesce(Tenant.max_running, settings().max_running)
    return (
        select(Job.id)
        .join(Tenant, Tenant.id == Job.tenant_id)
        .outerjoin(running, running.c.tenant_id == Job.tenant_id)
        .where(ready(at), rung_in(queues), held < limit)
        .order_by(held, Tenant.served_at.nulls_first(), Tenant.id, *_within_a_tenant())
        .limit(1)
    )


def _running() -> Subquery:
    """How many jobs of each tenant workers have; a tenant without any is not there."""
    count = func.count().label("count")
    held = select(Job.tenant_id, count).where(Job.status.in_(HELD))
    return held.group_by(Job.tenant_id).subquery("running")


def _within_a_tenant() -> tuple[SQLCoreOperations[Any], ...]:
    return (Job.priority.desc(), Job.expires_at, Job.created_at, Job.id)
