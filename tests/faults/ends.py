"""What must be true of every accepted job, whatever went wrong."""

import hashlib
from dataclasses import dataclass

from sqlalchemy import select

from api import db, storage
from api.models import FINAL, Artifact, Job, JobEvent, JobPiece, Status
from tests.service import eventually

FILES = [
    "layers.csv",
    "report.html",
    "report.json",
    "report.md",
    "report.pdf",
    "stack.json",
]
LAST = {f"job.{status.value}" for status in FINAL}


@dataclass(frozen=True)
class End:
    """How a job ended."""

    job: Job
    events: list[str]

    def count(self, kind: str) -> int:
        return self.events.count(kind)


def status(job_id: str) -> Status:
    with db.reading() as session:
        return session.get_one(Job, job_id).status


def ended(job_id: str, seconds: float = 120.0) -> End:
    """Wait for a job's end; then it ended once, with all of its files or with none."""
    assert eventually(lambda: status(job_id) in FINAL, seconds), trail(job_id)
    with db.reading() as session:
        job = session.get_one(Job, job_id)
        query = select(JobEvent).where(JobEvent.job_id == job_id)
        told = list(session.scalars(query.order_by(JobEvent.seq)))
        rows = list(session.scalars(select(Artifact).where(Artifact.job_id == job_id)))
    events = [event.type for event in told]
    assert [e.seq for e in told] == list(range(1, job.last_seq + 1)), events
    assert [kind for kind in events if kind in LAST] == events[-1:], events
    assert events[-1] == f"job.{job.status.value}"
    assert events.count("job.started") == job.attempt, events
    assert events.count("job.attempt_lost") == job.attempts_lost, events
    percents = [e.details["percent"] for e in told if "percent" in e.details]
    assert percents == sorted(percents)
    assert (job.percent == 100.0) == (job.status is Status.SUCCEEDED)
    assert (job.worker, job.lease_expires_at) == (None, None)
    _check_files(job, rows)
    return End(job, events)


def _check_files(job: Job, rows: list[Artifact]) -> None:
    whole = job.status is Status.SUCCEEDED
    assert sorted(row.name for row in rows) == (FILES if whole else [])
    for row in rows:
        assert row.attempt == job.attempt
        content = storage.store().read(storage.key(job.id, row.attempt, row.name))
        assert hashlib.sha256(content).hexdigest() == row.sha256
        assert len(content) == row.bytes


def no_pieces_are_left() -> bool:
    with db.reading() as session:
        return session.scalar(select(JobPiece.key).limit(1)) is None


def trail(job_id: str) -> list[str]:
    """Return what happened to a job, for who reads a failure."""
    with db.reading() as session:
        query = select(JobEvent).where(JobEvent.job_id == job_id)
        found = session.scalars(query.order_by(JobEvent.seq))
        return [f"{e.seq} {e.type} {e.details}" for e in found]
