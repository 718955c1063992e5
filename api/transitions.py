"""One UPDATE per transition of a job, with its events in the same transaction."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from sqlalchemy import (
    ColumnElement,
    Connection,
    Table,
    and_,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.orm import Session

from api import outbox
from api.models import HELD, Job, JobEvent, Status
from api.settings import settings
from optimizer.spec import OptimizeSpec

Event = tuple[str, dict[str, Any]]

SQLITE_TIME = "%Y-%m-%dT%H:%M:%f+00:00"
CLOCKS: dict[str, ColumnElement[Any]] = {  # by dialect; read with `moment`
    "sqlite": func.strftime(SQLITE_TIME, "now"),
    "postgresql": func.clock_timestamp(),
}
_NOW = {name: select(clock) for name, clock in CLOCKS.items()}  # made once, run often
_ADD_JOB = insert(cast(Table, Job.__table__))
_NULLS = dict.fromkeys(Job.__table__.columns.keys())
_AS_READ = Job.__mapper__.class_manager.new_instance  # a row that was never set
_ADD_EVENTS = insert(cast(Table, JobEvent.__table__))


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to run one job, once. A later claim on the same job voids it."""

    job_id: str
    tenant_id: str
    attempt: int
    spec: OptimizeSpec
    run_limit_s: float | None = None  # None: the setting's
    request_id: str | None = None  # of the request that asked for the job
    traceparent: str | None = None


def now(session: Session) -> datetime:
    """Return the database's time: the clocks of workers may differ."""
    connection = session.connection()
    return moment(connection.execute(_NOW[connection.dialect.name]).scalar_one())


def moment(read: datetime | str) -> datetime:
    """Return the time that one of the `CLOCKS` showed."""
    if isinstance(read, str):  # SQLite's: exact to the millisecond
        return datetime.fromisoformat(read)
    return read.astimezone(UTC)


def lease(at: datetime) -> datetime:
    """Return when a lease given now ends."""
    return at + timedelta(seconds=settings().lease_s)


def same(job: Job) -> ColumnElement[bool]:
    """Nothing has happened to the row since `job` was read."""
    return and_(Job.id == job.id, Job.status == job.status, Job.attempt == job.attempt)


def holds(claim: Claim, *statuses: Status) -> ColumnElement[bool]:
    """The claim is not void, and the job is in one of `statuses`."""
    return and_(
        Job.id == claim.job_id,
        Job.attempt == claim.attempt,
        Job.status.in_(statuses),
    )


def closing(status: Status, at: datetime) -> dict[str, Any]:
    """Return the changes that end a job."""
    free = {"worker": None, "lease_expires_at": None, "eta_s": None}
    return {**free, "status": status, "finished_at": at}


def waiting(at: datetime) -> dict[str, Any]:
    """Return the changes that put a job back into the queue."""
    free = {"worker": None, "lease_expires_at": None, "eta_s": None}
    return {**free, "status": Status.QUEUED, "queued_at": at, "finalizing_at": None}


def touch(session: Session, claim: Claim, **changes: Any) -> Job | None:
    """Change the row if the claim is not void, without an event. None: it is void."""
    return session.scalar(
        update(Job)
        .where(holds(claim, *HELD))
        .values(changes)
        .returning(Job)
        .execution_options(populate_existing=True, synchronize_session=False)
    )


def move(
    session: Session,
    condition: ColumnElement[bool],
    at: datetime,
    happened: list[Event],
    **changes: Any,
) -> Job | None:
    """Change one row if `condition` holds, and write what happened. None: it did not."""
    job = session.scalar(
        update(Job)
        .where(condition)
        .values(last_seq=Job.last_seq + len(happened), **changes)
        .returning(Job)
        .execution_options(populate_existing=True, synchronize_session=False)
    )
    if job is None:
        return None
    first = job.last_seq - len(happened) + 1
    _log(session.connection(), job, first, happened, at)
    outbox.enqueue(session, job, first, happened, at)
    session.flush()
    return job


def begin(
    connection: Connection, columns: dict[str, Any], at: datetime, happened: list[Event]
) -> Job:
    """Add a job that nobody knows yet, with what happened to it so far.

    Nobody is told: that is the caller's. `columns` has every one that is not null. The
    row is written past the unit of work, which would take longer than all the rest of
    a request: no session knows the job, which is to be read and not changed.
    """
    columns["last_seq"] = len(happened)
    said = {name: value for name, value in columns.items() if value is not None}
    connection.execute(_ADD_JOB, said)  # each null would cost time
    job = cast(Job, _AS_READ())
    job.__dict__.update(_NULLS, **columns)
    _log(connection, job, 1, happened, at)
    return job


def _log(
    connection: Connection, job: Job, first: int, happened: list[Event], at: datetime
) -> None:
    rows = [
        _event(job, seq, kind, details, at)
        for seq, (kind, details) in enumerate(happened, first)
    ]
    if rows:
        connection.execute(_ADD_EVENTS, rows)


def _event(
    job: Job, seq: int, kind: str, details: dict[str, Any], at: datetime
) -> dict[str, Any]:
    return {
        "job_id": job.id,
        "seq": seq,
        "tenant_id": job.tenant_id,
        "type": kind,
        "at": at,
        "details": {"status": job.status.value, "attempt": job.attempt, **details},
    }
