"""What is old goes, and nothing else, on SQLite and on PostgreSQL."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, select, update

from api import auth, jobs, sweeps
from api.db import reading, transaction
from api.models import Artifact, Base, Job, JobEvent
from api.storage import Stored
from optimizer.spec import OptimizeSpec
from workers import upkeep

pytestmark = pytest.mark.usefixtures("database")

SPEC = OptimizeSpec("tiny", "/models/tiny", "0" * 64, "h100")
LONG_AGO = datetime.now(UTC) - timedelta(days=91)
FILE = Stored("report.json", "a" * 64, 2, "application/json")


def ended() -> str:
    """A job that succeeded, with a file."""
    with transaction() as session:
        tenant = auth.tenant_named(session, "acme").id
        job_id = jobs.submit(session, tenant, SPEC).id
        claim = jobs.claim(session, job_id, "worker-1")
        assert claim is not None
        assert jobs.succeed(session, claim, "sla_met", {}, [FILE])
    return job_id


def change(job_id: str, **values: object) -> None:
    with transaction() as session:
        session.execute(update(Job).where(Job.id == job_id).values(values))


def count(table: type[Base], job_id: str) -> int:
    mine = table.__table__.c["job_id" if table is not Job else "id"] == job_id
    with reading() as session:
        found = select(func.count()).select_from(table.__table__).where(mine)
        return int(session.scalar(found) or 0)


def test_events_of_jobs_that_ended_long_ago_go_and_the_jobs_stay() -> None:
    old, young = ended(), ended()
    change(old, finished_at=LONG_AGO)
    with transaction() as session:
        assert sweeps.purge_events(session) == 1
        assert sweeps.purge_events(session) == 0
    assert (count(JobEvent, old), count(Job, old)) == (0, 1)
    assert count(JobEvent, young) > 0


def test_a_job_that_runs_for_long_keeps_its_events() -> None:
    with transaction() as session:
        tenant = auth.tenant_named(session, "acme").id
        job_id = jobs.submit(session, tenant, SPEC).id
    change(job_id, created_at=LONG_AGO)
    with transaction() as session:
        assert sweeps.purge_events(session) == 0


def test_tombstones_go_with_all_that_is_theirs() -> None:
    old, young, alive = ended(), ended(), ended()
    change(old, deleted_at=LONG_AGO)
    change(young, deleted_at=datetime.now(UTC))
    with transaction() as session:
        assert sweeps.purge_tombstones(session) == 1
    assert [count(t, old) for t in (Job, JobEvent, Artifact)] == [0, 0, 0]
    for job_id in (young, alive):
        assert (count(Job, job_id), count(Artifact, job_id)) == (1, 1)


def test_the_upkeep_does_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ended()
    change(old, finished_at=LONG_AGO)
    told = upkeep.tidy()
    assert told == {
        "events": 1,
        "tombstones": 0,
        "promises": 0,
        "sessions": 0,
        "letters": 0,
        "artifacts": 0,
        "uploads": 0,
    }

    def fails(session: object) -> int:
        raise OSError("away")

    monkeypatch.setattr(sweeps, "purge_events", fails)
    assert "artifacts" in upkeep.tidy()  # one that fails stops no other
