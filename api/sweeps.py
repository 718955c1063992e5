"""What nobody does at once: bury the dead, let go of what waited too long.

Many sweeps may run at once: each row is moved by one of them. Callers commit
(`db.transaction`), and time is the database's.
"""

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, exists, select, update
from sqlalchemy.orm import Session

from api import turns
from api.models import FINAL, HELD, Artifact, Job, JobEvent, JobPiece, Status
from api.settings import settings
from api.transitions import (
    Claim,
    Event,
    closing,
    holds,
    move,
    now,
    same,
    waiting,
)

LIMIT = 200  # rows per pass and kind; the rest waits for the next pass

WORKER_LOST = {
    "code": "worker_lost",
    "category": "platform",
    "retryable": True,
    "message": "every worker that took this job stopped answering, or ran out of "
    "memory; send the request again, or try a smaller model",
}


def sweep(session: Session) -> None:
    """Queue again, or end, what stopped beating, stopping or waiting in time."""
    at = now(session)
    _name_devices(session)
    overdue = and_(Job.status.in_(HELD), Job.lease_expires_at < at)
    for job in _some(session, overdue):
        _give_up(session, job, at, and_(same(job), Job.lease_expires_at < at))
    limit = at - timedelta(seconds=settings().cancel_limit_s)
    stuck = and_(Job.status == Status.CANCELLING, Job.cancel_requested_at < limit)
    for job in _some(session, stuck):
        _end(session, job, Status.CANCELLED, at)
    for job in _some(session, and_(Job.status == Status.QUEUED, turns.late(at))):
        _end(session, job, Status.EXPIRED, at)


def _name_devices(session: Session) -> None:
    """Say in the row what versions before 0003 say in the specification alone."""
    blank = and_(Job.status == Status.QUEUED, Job.hardware == "")
    named = update(Job).where(blank).values(hardware=Job.spec["hardware"].as_string())
    session.execute(named.execution_options(synchronize_session=False))


def lost(session: Session, claim: Claim, excerpt: str = "") -> bool:
    """Give an attempt up at once: its process ended without a word. False: it is void.

    `excerpt` is what the process printed last, for the owner.
    """
    job = session.scalar(select(Job).where(holds(claim, *HELD)))
    if job is None:
        return False
    _give_up(session, job, now(session), same(job), excerpt)
    return True


def purge_events(session: Session) -> int:
    """Delete the events of jobs that ended long ago. Return of how many jobs."""
    before = now(session) - timedelta(seconds=settings().events_kept_s)
    over = and_(Job.status.in_(FINAL), Job.finished_at < before)
    told = exists().where(JobEvent.job_id == Job.id)
    found = _ids(session, and_(over, told))
    session.execute(delete(JobEvent).where(JobEvent.job_id.in_(found)))
    return len(found)


def purge_tombstones(session: Session) -> int:
    """Forget jobs that their owners deleted long ago. Return how many."""
    before = now(session) - timedelta(seconds=settings().tombstones_kept_s)
    found = _ids(session, Job.deleted_at < before)
    for table in (JobEvent, JobPiece, Artifact):
        session.execute(delete(table).where(table.job_id.in_(found)))
    session.execute(delete(Job).where(Job.id.in_(found)))
    return len(found)


def _ids(session: Session, condition: ColumnElement[bool]) -> list[str]:
    """Return some jobs, which nobody else deletes meanwhile."""
    query = select(Job.id).where(condition).limit(LIMIT)
    return list(session.scalars(query.with_for_update(skip_locked=True)))


def _some(session: Session, condition: ColumnElement[bool]) -> list[Job]:
    return list(session.scalars(select(Job).where(condition).limit(LIMIT)))


def _give_up(
    session: Session,
    job: Job,
    at: datetime,
    still: ColumnElement[bool],
    excerpt: str = "",
) -> None:
    if job.status is Status.CANCELLING:
        _end(session, job, Status.CANCELLED, at)
        return
    lost: Event = ("job.attempt_lost", {})
    changes: dict[str, Any] = {"attempts_lost": job.attempts_lost + 1}
    if job.attempts_lost + 1 >= settings().max_attempts:
        error = WORKER_LOST | ({"log_excerpt": excerpt} if excerpt else {})
        failed: Event = ("job.failed", {"error": error})
        changes |= closing(Status.FAILED, at) | {"error": error}
        move(session, still, at, [lost, failed], **changes)
    else:
        changes |= waiting(at)
        move(session, still, at, [lost, ("job.queued", {})], **changes)


def _end(session: Session, job: Job, status: Status, at: datetime) -> None:
    event: Event = (f"job.{status.value}", {})
    move(session, same(job), at, [event], **closing(status, at))
