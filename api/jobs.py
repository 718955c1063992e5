"""The life of a job, as its owner and its worker see it.

    queued → running → finalizing → succeeded | failed | cancelled | expired
                 └────────┴→ cancelling → cancelled

The row is the truth. The broker's message is a doorbell: it may be lost, late or
doubled, and nothing breaks. Each transition is one UPDATE that names the state it
comes from, and writes its events in the same transaction. Each write of a worker
carries its attempt (the fence): a worker given up for dead changes nothing.

Queries on `jobs` are here, in `turns` (who is next) and in `sweeps` (what went wrong,
and what is old). Callers commit (`db.transaction`), and time is the database's.
"""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, NamedTuple

from sqlalchemy import and_, case, func, select
from sqlalchemy.orm import Session

from api import ids, orders, outbox, turns
from api.errors import NotFound
from api.models import Artifact, Job, JobEvent, Status
from api.orders import Order
from api.settings import settings
from api.storage import Stored
from api.transitions import (
    Claim,
    Event,
    begin,
    closing,
    holds,
    lease,
    move,
    now,
    touch,
    waiting,
)
from optimizer.spec import OptimizeSpec

PROGRESS_EVERY_S = 1.0  # progress events are coalesced to this; the row never is
MOST_LINES = 200  # of a job's log, all attempts together
BELOW_FINAL = 99.9  # 100 percent is for final states


class Signal(StrEnum):
    """What a worker learns when it writes."""

    OK = "ok"
    CANCEL = "cancel"  # the owner wants the job to stop
    LOST = "lost"  # the claim is void: stop, and write nothing


class Trials(NamedTuple):
    """Measurements that are there, of those that an attempt asked for so far."""

    done: int = 0
    planned: int = 0

    def columns(self) -> dict[str, int]:
        """Return them as a job's row has them."""
        return {"trials_done": self.done, "trials_planned": self.planned}


# -- for the owner -------------------------------------------------------------


def submit(
    session: Session,
    tenant_id: str,
    spec: OptimizeSpec,
    body: dict[str, Any] | None = None,
    order: Order = orders.PLAIN,
) -> Job:
    """Add a queued job. `body` is the request as the caller wrote it.

    What is returned is to be read: the session does not know it (`transitions.begin`).
    Raises QuotaExceeded where the tenant has as many waiting as it may.
    """
    connection = session.connection()
    at, heard = turns.admit(connection, tenant_id)
    columns = {
        "id": ids.new("job"),
        "tenant_id": tenant_id,
        "status": Status.QUEUED,
        "attempt": 0,
        "attempts_lost": 0,
        "percent": 0.0,
        "trials_done": 0,
        "trials_planned": 0,
        "body": body or {},
        "spec": spec.to_json(),
        "hardware": spec.hardware,
        "created_at": at,
        "queued_at": at,
        "rung_at": at,
        **order.columns(at),
    }
    happened: list[Event] = [("job.created", {}), ("job.queued", {})]
    job = begin(connection, columns, at, happened)
    if heard:
        outbox.enqueue(session, job, 1, happened, at)
        session.flush()
    return job


def get(session: Session, tenant_id: str, job_id: str) -> Job:
    """Return the tenant's job or raise `NotFound`, also for another tenant's."""
    job = session.scalar(
        select(Job).where(Job.id == job_id, Job.tenant_id == tenant_id)
    )
    if job is None:
        raise NotFound(f"no job {job_id[:64]}")
    return job


def cancel(session: Session, tenant_id: str, job_id: str) -> Job:
    """Ask a job to stop. A final one, or one that is stopping, stays as it is."""
    job = get(session, tenant_id, job_id)
    at = now(session)
    queued = and_(Job.id == job.id, Job.status == Status.QUEUED)
    asked = {"cancel_requested_at": at}
    ended = {**asked, "status": Status.CANCELLED, "finished_at": at}
    if moved := move(session, queued, at, [("job.cancelled", {})], **ended):
        return moved
    busy = and_(Job.id == job.id, Job.status.in_((Status.RUNNING, Status.FINALIZING)))
    event: Event = ("job.cancelling", {})
    if moved := move(session, busy, at, [event], status=Status.CANCELLING, **asked):
        return moved
    session.expire(job)
    return get(session, tenant_id, job_id)


def events(
    session: Session, tenant_id: str, job_id: str, after: int, limit: int
) -> list[JobEvent]:
    """Return events with `seq` > `after`, oldest first. Raises NotFound."""
    query = (
        select(JobEvent)
        .where(JobEvent.job_id == job_id, JobEvent.tenant_id == tenant_id)
        .where(JobEvent.seq > after)
        .order_by(JobEvent.seq)
        .limit(limit)
    )
    get(session, tenant_id, job_id)
    return list(session.scalars(query))


def events_of(
    session: Session, tenant_id: str, job_id: str, type_: str, limit: int
) -> list[JobEvent]:
    """Return the events of one type, oldest first."""
    query = (
        select(JobEvent)
        .where(JobEvent.job_id == job_id, JobEvent.tenant_id == tenant_id)
        .where(JobEvent.type == type_)
        .order_by(JobEvent.seq)
        .limit(limit)
    )
    return list(session.scalars(query))


def artifacts(session: Session, tenant_id: str, job_id: str) -> list[Artifact]:
    """Return what the job published, by name. Raises NotFound."""
    get(session, tenant_id, job_id)
    query = select(Artifact).where(
        Artifact.job_id == job_id, Artifact.tenant_id == tenant_id
    )
    return list(session.scalars(query.order_by(Artifact.name)))


# -- for the worker ------------------------------------------------------------


def claim_next(session: Session, worker: str, queues: Collection[str]) -> Claim | None:
    """Take the job whose turn it is. None: nothing waits that this worker may take."""
    turns.serialize(session)
    job_id = session.scalar(turns.claimable(now(session), queues))
    return None if job_id is None else claim(session, job_id, worker)


def claim(session: Session, job_id: str, worker: str) -> Claim | None:
    """Take this very job. None: someone has it, or it ended."""
    at = now(session)
    job = move(
        session,
        and_(Job.id == job_id, turns.ready(at)),
        at,
        [("job.started", {})],
        status=Status.RUNNING,
        attempt=Job.attempt + 1,
        worker=worker,
        lease_expires_at=lease(at),
        started_at=func.coalesce(Job.started_at, at),
        eta_s=None,
    )
    if job is None:
        return None
    turns.served(session, job.tenant_id, at)
    spec = OptimizeSpec.from_json(job.spec)
    asked = (job.run_limit_s, job.request_id, job.traceparent)
    return Claim(job.id, job.tenant_id, job.attempt, spec, *asked)


def beat(session: Session, claim: Claim) -> Signal:
    """Say that the worker lives, and hear whether it should go on."""
    return _signal(touch(session, claim, lease_expires_at=lease(now(session))))


def progress(
    session: Session,
    claim: Claim,
    phase: str,
    percent: float,
    eta_s: float | None = None,
    trials: Trials | None = None,
) -> Signal:
    """Say how far the job got; this is a beat too.

    `percent` (0..100) never goes back, also over attempts, and stays below 100.
    Without `eta_s` the rest is taken to go as fast as what is done.
    """
    at = now(session)
    percent = min(max(percent, 0.0), BELOW_FINAL)
    further = case((Job.percent < percent, percent), else_=Job.percent)
    changes = {"percent": further, "eta_s": eta_s, "lease_expires_at": lease(at)}
    counts = {} if trials is None else trials.columns()
    job = touch(session, claim, **changes, **counts)
    if job is None or job.status is Status.CANCELLING:
        return _signal(job)
    if eta_s is None:
        job.eta_s = _eta_s(job, at)
        session.flush()
    _tell_progress(session, claim, job, phase, at)
    return Signal.OK


def resolved(session: Session, claim: Claim, spec: OptimizeSpec) -> bool:
    """Say what a job's address came to. False: the claim is void."""
    at = now(session)
    return (
        touch(session, claim, spec=spec.to_json(), lease_expires_at=lease(at))
        is not None
    )


def tried(session: Session, claim: Claim, stacks: list[dict[str, Any]]) -> bool:
    """Tell the owner of stacks that were measured. False: the claim is void."""
    running = holds(claim, Status.RUNNING)
    happened: list[Event] = [("job.trial_completed", stack) for stack in stacks]
    return move(session, running, now(session), happened) is not None


def trained(session: Session, claim: Claim, losses: dict[str, Any]) -> bool:
    """Tell the owner of a run's losses. False: the claim is void."""
    running = holds(claim, Status.RUNNING)
    return move(session, running, now(session), [("job.losses", losses)]) is not None


def logged(session: Session, claim: Claim, line: str) -> bool:
    """Tell the owner a line, unless the job has told enough. False: the claim is void."""
    running = holds(claim, Status.RUNNING)
    said = select(func.count()).where(
        JobEvent.job_id == claim.job_id, JobEvent.type == "job.log"
    )
    enough = session.scalar(said) or 0
    told: list[Event] = [("job.log", {"level": "info", "message": line})]
    happened = told if enough < MOST_LINES else []
    return move(session, running, now(session), happened) is not None


def warn(session: Session, claim: Claim, code: str, message: str) -> bool:
    """Tell the owner what the job went through. False: the claim is void."""
    running = holds(claim, Status.RUNNING, Status.FINALIZING)
    event: Event = ("job.warning", {"code": code, "message": message})
    return move(session, running, now(session), [event]) is not None


def finalize(session: Session, claim: Claim) -> bool:
    """Enter the last stretch: artifacts are being stored. False: the claim is void.

    Safe to call twice: who was not told of the first call's commit calls again.
    """
    at = now(session)
    running = holds(claim, Status.RUNNING)
    event: Event = ("job.finalizing", {})
    changes = {"finalizing_at": at, "lease_expires_at": lease(at)}
    if move(session, running, at, [event], status=Status.FINALIZING, **changes):
        return True
    entered = select(Job.id).where(holds(claim, Status.FINALIZING))
    return session.scalar(entered) is not None


def succeed(
    session: Session,
    claim: Claim,
    outcome: str,
    summary: dict[str, Any],
    artifacts: Sequence[Stored] = (),
) -> bool:
    """Close a job and publish its artifacts, at once. False: the claim is void."""
    at = now(session)
    held = holds(claim, Status.RUNNING, Status.FINALIZING)
    events = [*map(_created, artifacts), ("job.succeeded", {"outcome": outcome})]
    changes = closing(Status.SUCCEEDED, at) | {"percent": 100.0}
    if not move(session, held, at, events, outcome=outcome, summary=summary, **changes):
        return False
    session.add_all(_published(claim, stored, at) for stored in artifacts)
    session.flush()
    return True


def fail(session: Session, claim: Claim, error: dict[str, Any]) -> bool:
    """Close a job that cannot be done. False: the claim is void, or a cancel came.

    `error` has `code`, `category` (user, model, hardware, platform), `retryable`,
    `message`, and `phase` where it is known.
    """
    at = now(session)
    held = holds(claim, Status.RUNNING, Status.FINALIZING)
    event: Event = ("job.failed", {"error": error})
    changes = closing(Status.FAILED, at)
    return move(session, held, at, [event], error=error, **changes) is not None


def cancelled(session: Session, claim: Claim) -> bool:
    """Close a job that stopped as its owner asked. False: the claim is void."""
    at = now(session)
    stopping = holds(claim, Status.CANCELLING)
    event: Event = ("job.cancelled", {})
    changes = closing(Status.CANCELLED, at)
    return move(session, stopping, at, [event], **changes) is not None


def release(session: Session, claim: Claim) -> bool:
    """Give a job back unfinished: the worker is told to stop. No attempt is lost."""
    at = now(session)
    held = holds(claim, Status.RUNNING, Status.FINALIZING)
    event: Event = ("job.queued", {"reason": "worker_stopped"})
    return move(session, held, at, [event], **waiting(at)) is not None


# -- for operators -----------------------------------------------------------


def _signal(job: Job | None) -> Signal:
    if job is None:
        return Signal.LOST
    return Signal.CANCEL if job.status is Status.CANCELLING else Signal.OK


def _eta_s(job: Job, at: datetime) -> float | None:
    if job.started_at is None or job.percent < 1:  # too little to go by
        return None
    return (at - job.started_at).total_seconds() * (100 / job.percent - 1)


def _tell_progress(
    session: Session, claim: Claim, job: Job, phase: str, at: datetime
) -> None:
    """Write an event where the phase changed or the last one is a second old."""
    entered = phase != job.phase
    soon = at - timedelta(seconds=PROGRESS_EVERY_S)
    if not entered and job.progressed_at is not None and job.progressed_at > soon:
        return
    kind = "job.phase_changed" if entered else "job.progress"
    details = {"phase": phase, "percent": job.percent, "eta_seconds": job.eta_s}
    held = holds(claim, Status.RUNNING, Status.FINALIZING)
    move(session, held, at, [(kind, details)], phase=phase, progressed_at=at)


def _created(stored: Stored) -> Event:
    told = {"name": stored.name, "kind": stored.kind, "bytes": stored.bytes}
    return ("artifact.created", {**told, "sha256": stored.sha256})


def _published(claim: Claim, stored: Stored, at: datetime) -> Artifact:
    return Artifact(
        job_id=claim.job_id,
        name=stored.name,
        tenant_id=claim.tenant_id,
        attempt=claim.attempt,
        sha256=stored.sha256,
        bytes=stored.bytes,
        media_type=stored.media_type,
        kind=stored.kind,
        created_at=at,
        expires_at=at + timedelta(seconds=settings().artifacts_kept_s),
    )
