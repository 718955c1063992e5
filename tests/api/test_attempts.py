"""An attempt that is known to be lost is given up at once, and only once."""

import pytest

from api import auth, db, jobs, sweeps
from api.models import Job, JobEvent, Status
from api.transitions import Claim
from optimizer.spec import OptimizeSpec

SPEC = OptimizeSpec("tiny", "/models/tiny", "0" * 64, "h100")

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def claim(database: str) -> Claim:
    with db.transaction() as session:
        tenant = auth.tenant_named(session, "acme").id
        job_id = jobs.submit(session, tenant, SPEC).id
    return claimed(job_id)


def claimed(job_id: str) -> Claim:
    with db.transaction() as session:
        claim = jobs.claim(session, job_id, "test")
    assert claim is not None
    return claim


def lose(claim: Claim) -> bool:
    with db.transaction() as session:
        return sweeps.lost(session, claim)


def read(job_id: str) -> Job:
    with db.reading() as session:
        return session.get_one(Job, job_id)


def events(job_id: str) -> list[JobEvent]:
    with db.reading() as session:
        found = session.query(JobEvent).filter_by(job_id=job_id)
        return list(found.order_by(JobEvent.seq))


def test_a_lost_attempt_waits_for_no_lease(claim: Claim) -> None:
    assert lose(claim)
    assert read(claim.job_id).status is Status.QUEUED
    assert [e.type for e in events(claim.job_id)][-2:] == [
        "job.attempt_lost",
        "job.queued",
    ]
    assert not lose(claim)  # it is nobody's by now


def test_the_last_attempt_fails_the_job(claim: Claim) -> None:
    assert lose(claim)
    assert lose(claimed(claim.job_id))
    job = read(claim.job_id)
    assert job.status is Status.FAILED
    assert job.error is not None
    assert job.error["code"] == "worker_lost"


def test_a_cancel_comes_before_a_new_attempt(claim: Claim) -> None:
    with db.transaction() as session:
        jobs.cancel(session, claim.tenant_id, claim.job_id)
    assert lose(claim)
    assert read(claim.job_id).status is Status.CANCELLED


def test_a_warning_is_an_event(claim: Claim) -> None:
    with db.transaction() as session:
        assert jobs.warn(session, claim, "run_with_less_memory", "it was too large")
    last = events(claim.job_id)[-1]
    assert last.type == "job.warning"
    assert last.details["code"] == "run_with_less_memory"
    assert lose(claim)
    with db.transaction() as session:
        assert not jobs.warn(session, claim, "run_with_less_memory", "void")
