"""The life of a job, on SQLite and on PostgreSQL."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from threading import Barrier

import pytest
from sqlalchemy import update
from sqlalchemy.exc import StatementError

from api import auth, jobs, owners, settings, sweeps, views
from api.db import reading, transaction
from api.errors import NotFound
from api.jobs import Signal
from api.models import FINAL, Artifact, Job, JobEvent, Status
from api.owners import Filter
from api.storage import Stored
from api.transitions import Claim
from optimizer.spec import OptimizeSpec

pytestmark = pytest.mark.usefixtures("database")

SPEC = OptimizeSpec("tiny", "/models/tiny", "0" * 64, "h100")
ERROR = {"code": "non_finite", "category": "model", "retryable": False, "message": "m"}
PAST = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture
def tenant() -> str:
    with transaction() as session:
        return auth.tenant_named(session, "acme").id


@pytest.fixture
def job_id(tenant: str) -> str:
    with transaction() as session:
        return jobs.submit(session, tenant, SPEC, {"model": "tiny"}).id


@pytest.fixture
def claim(job_id: str) -> Claim:
    return claimed(job_id)


def claimed(job_id: str) -> Claim:
    with transaction() as session:
        claim = jobs.claim(session, job_id, "worker-1")
    assert claim is not None
    return claim


def read(job_id: str) -> Job:
    with reading() as session:
        job = session.get(Job, job_id)
    assert job is not None
    return job


def history(job_id: str) -> list[JobEvent]:
    with reading() as session:
        job = session.get(Job, job_id)
        assert job is not None
        return jobs.events(session, job.tenant_id, job_id, 0, 1000)


def types(job_id: str) -> list[str]:
    return [event.type for event in history(job_id)]


def change(job_id: str, **values: object) -> None:
    """Reach under the table, where a test would otherwise have to wait."""
    with transaction() as session:
        session.execute(update(Job).where(Job.id == job_id).values(values))


def sweep() -> None:
    with transaction() as session:
        sweeps.sweep(session)


def test_the_whole_life(tenant: str, job_id: str) -> None:
    claim = claimed(job_id)
    assert claim == Claim(job_id, tenant, 1, SPEC)
    with transaction() as session:
        assert jobs.progress(session, claim, "sweep", 40.0, 12.0) is Signal.OK
    with transaction() as session:
        assert jobs.finalize(session, claim)
        assert jobs.finalize(session, claim)  # as who was not told of the commit does
    report = Stored("report.json", "a" * 64, 2, "application/json")
    with transaction() as session:
        assert jobs.succeed(session, claim, "sla_met", {"x": 1}, [report])

    job = read(job_id)
    assert (job.status, job.percent, job.outcome) == ("succeeded", 100.0, "sla_met")
    assert (job.summary, job.worker, job.lease_expires_at) == ({"x": 1}, None, None)
    with reading() as session:
        (artifact,) = jobs.artifacts(session, tenant, job_id)
    assert (artifact.name, artifact.attempt, artifact.bytes) == ("report.json", 1, 2)
    assert types(job_id) == [
        "job.created",
        "job.queued",
        "job.started",
        "job.phase_changed",
        "job.finalizing",
        "artifact.created",
        "job.succeeded",
    ]


def test_times_are_aware_and_in_order(claim: Claim) -> None:
    job = read(claim.job_id)
    assert job.started_at is not None
    assert job.created_at.tzinfo is UTC
    assert timedelta(0) <= job.started_at - job.created_at < timedelta(minutes=1)
    assert abs(datetime.now(UTC) - job.started_at) < timedelta(minutes=1)


def test_sixteen_claims_have_one_winner(job_id: str) -> None:
    together = Barrier(16)

    def race(number: int) -> Claim | None:
        together.wait()
        with transaction() as session:
            return jobs.claim(session, job_id, f"worker-{number}")

    with ThreadPoolExecutor(16) as pool:
        claims = [c for c in pool.map(race, range(16)) if c is not None]
    assert [c.attempt for c in claims] == [1]
    assert types(job_id).count("job.started") == 1


def test_events_of_many_writers_have_no_gap(job_id: str) -> None:
    """Two bells, a cancel and the worker's own writes at once: seq is 1, 2, 3, …"""
    claim = claimed(job_id)
    together = Barrier(8)

    def write(number: int) -> None:
        together.wait()
        for step in range(5):
            with transaction() as session:
                jobs.progress(session, claim, f"phase-{number}-{step}", 1.0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    seqs = [event.seq for event in history(job_id)]
    assert seqs == list(range(1, 3 + 1 + 8 * 5))


def test_percent_never_goes_back_and_stays_below_100(claim: Claim) -> None:
    seen = []
    for percent in (10.0, 55.0, 30.0, 100.0, 250.0, -3.0):
        with transaction() as session:
            jobs.progress(session, claim, "sweep", percent)
        seen.append(read(claim.job_id).percent)
    assert seen == [10.0, 55.0, 55.0, 99.9, 99.9, 99.9]


def test_progress_events_are_coalesced_but_the_row_is_not(
    claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "PROGRESS_EVERY_S", 60.0)  # twenty writes may take one
    for percent in range(1, 21):
        with transaction() as session:
            jobs.progress(session, claim, "sweep", float(percent))
    assert read(claim.job_id).percent == 20.0
    assert types(claim.job_id).count("job.phase_changed") == 1
    assert "job.progress" not in types(claim.job_id)

    change(claim.job_id, progressed_at=PAST)
    with transaction() as session:
        jobs.progress(session, claim, "sweep", 21.0, 7.0)
    last = history(claim.job_id)[-1]
    assert last.type == "job.progress"
    assert last.details["percent"] == 21.0
    assert last.details["eta_seconds"] == 7.0


def test_trials_are_counted_with_progress(claim: Claim) -> None:
    with transaction() as session:
        jobs.progress(session, claim, "sweep", 10.0, None, jobs.Trials(3, 9))
    with transaction() as session:
        jobs.progress(session, claim, "sweep", 11.0)  # one that does not know them
    progress = views.job(read(claim.job_id)).progress
    assert (progress.trials_done, progress.trials_planned) == (3, 9)


def test_eta_follows_from_what_is_done(claim: Claim) -> None:
    # a quarter done in 30 s: three quarters are left, 90 s
    change(claim.job_id, started_at=datetime.now(UTC) - timedelta(seconds=30))
    with transaction() as session:
        jobs.progress(session, claim, "sweep", 25.0)
    assert read(claim.job_id).eta_s == pytest.approx(90.0, abs=15)


def test_a_queued_job_is_cancelled_at_once(tenant: str, job_id: str) -> None:
    with transaction() as session:
        assert jobs.cancel(session, tenant, job_id).status is Status.CANCELLED
    with transaction() as session:
        assert jobs.claim(session, job_id, "worker-1") is None
    assert types(job_id)[-1] == "job.cancelled"


def test_a_running_job_hears_of_its_cancel(tenant: str, claim: Claim) -> None:
    with transaction() as session:
        assert jobs.beat(session, claim) is Signal.OK
        assert jobs.cancel(session, tenant, claim.job_id).status is Status.CANCELLING
    with transaction() as session:
        assert jobs.beat(session, claim) is Signal.CANCEL
        assert jobs.progress(session, claim, "sweep", 50.0) is Signal.CANCEL
        assert not jobs.succeed(session, claim, "sla_met", {})
        assert not jobs.fail(session, claim, ERROR)
        assert jobs.cancelled(session, claim)
    assert read(claim.job_id).status is Status.CANCELLED


def test_cancel_twice_is_once(tenant: str, claim: Claim) -> None:
    for _ in range(3):
        with transaction() as session:
            jobs.cancel(session, tenant, claim.job_id)
    assert types(claim.job_id).count("job.cancelling") == 1


def end_by_success(claim: Claim) -> None:
    with transaction() as session:
        jobs.succeed(session, claim, "sla_met", {})


def end_by_failure(claim: Claim) -> None:
    with transaction() as session:
        jobs.fail(session, claim, ERROR)


def end_by_cancel(claim: Claim) -> None:
    with transaction() as session:
        jobs.cancel(session, claim.tenant_id, claim.job_id)
        jobs.cancelled(session, claim)


@pytest.mark.parametrize("end", [end_by_success, end_by_failure, end_by_cancel])
def test_nothing_leaves_a_final_state(
    claim: Claim, end: Callable[[Claim], None]
) -> None:
    end(claim)
    before, events = read(claim.job_id), types(claim.job_id)
    assert before.status in FINAL
    with transaction() as session:
        assert jobs.beat(session, claim) is Signal.LOST
        assert jobs.progress(session, claim, "sweep", 50.0) is Signal.LOST
        assert not jobs.finalize(session, claim)
        assert not jobs.succeed(session, claim, "sla_met", {})
        assert not jobs.fail(session, claim, ERROR)
        assert not jobs.cancelled(session, claim)
        assert not jobs.release(session, claim)
        assert jobs.cancel(session, claim.tenant_id, claim.job_id).status in FINAL
        sweeps.sweep(session)
    assert types(claim.job_id) == events
    assert read(claim.job_id).status is before.status


def test_a_lost_worker_is_replaced_and_fenced_off(claim: Claim) -> None:
    with transaction() as session:
        jobs.progress(session, claim, "sweep", 60.0)
    change(claim.job_id, lease_expires_at=PAST)
    sweep()
    assert types(claim.job_id)[-2:] == ["job.attempt_lost", "job.queued"]

    second = claimed(claim.job_id)
    assert second.attempt == 2
    with transaction() as session:  # the dead worker wakes up
        assert jobs.beat(session, claim) is Signal.LOST
        assert jobs.progress(session, claim, "report", 99.0) is Signal.LOST
        assert not jobs.succeed(session, claim, "sla_met", {})
        assert not jobs.fail(session, claim, ERROR)
        assert not jobs.release(session, claim)
    job = read(claim.job_id)
    assert (job.status, job.percent) == ("running", 60.0)  # held, not gone back


def test_the_last_lost_worker_fails_the_job(claim: Claim) -> None:
    change(claim.job_id, lease_expires_at=PAST)
    sweep()
    claimed(claim.job_id)
    change(claim.job_id, lease_expires_at=PAST)
    sweep()
    job = read(claim.job_id)
    assert job.status is Status.FAILED
    assert job.error is not None
    assert job.error["code"] == "worker_lost"
    assert types(claim.job_id)[-2:] == ["job.attempt_lost", "job.failed"]


def test_a_released_job_loses_no_attempt(claim: Claim) -> None:
    for _ in range(5):
        with transaction() as session:
            assert jobs.release(session, claim)
        claim = claimed(claim.job_id)
    assert claim.attempt == 6
    assert read(claim.job_id).attempts_lost == 0


def test_a_worker_lost_while_stopping_has_stopped(claim: Claim) -> None:
    with transaction() as session:
        jobs.cancel(session, claim.tenant_id, claim.job_id)
    change(claim.job_id, lease_expires_at=PAST)
    sweep()
    assert read(claim.job_id).status is Status.CANCELLED


def test_a_worker_that_will_not_stop_is_cut_off(claim: Claim) -> None:
    with transaction() as session:
        jobs.cancel(session, claim.tenant_id, claim.job_id)
    sweep()
    assert read(claim.job_id).status is Status.CANCELLING
    change(claim.job_id, cancel_requested_at=PAST)
    sweep()
    with transaction() as session:
        assert jobs.beat(session, claim) is Signal.LOST
    assert read(claim.job_id).status is Status.CANCELLED


def test_many_sweeps_at_once_bury_a_worker_once(claim: Claim) -> None:
    change(claim.job_id, lease_expires_at=PAST)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: sweep(), range(4)))
    assert types(claim.job_id).count("job.attempt_lost") == 1
    seqs = [event.seq for event in history(claim.job_id)]
    assert seqs == list(range(1, len(seqs) + 1))


def test_a_job_that_began_in_time_is_not_late_for_its_second_attempt(
    claim: Claim,
) -> None:
    change(claim.job_id, expires_at=PAST, lease_expires_at=PAST)
    sweep()
    sweep()
    assert read(claim.job_id).status is Status.QUEUED
    assert claimed(claim.job_id).attempt == 2


def test_a_job_that_waited_too_long_expires(job_id: str) -> None:
    change(job_id, expires_at=PAST)
    with transaction() as session:
        assert jobs.claim(session, job_id, "worker-1") is None
    sweep()
    assert read(job_id).status is Status.EXPIRED
    assert types(job_id)[-1] == "job.expired"


def test_a_beat_holds_the_lease(claim: Claim) -> None:
    change(claim.job_id, lease_expires_at=PAST)
    with transaction() as session:
        jobs.beat(session, claim)
    sweep()
    ends = read(claim.job_id).lease_expires_at
    assert ends is not None
    left = (ends - datetime.now(UTC)).total_seconds()
    assert left == pytest.approx(settings.settings().lease_s, abs=10)


def test_another_tenants_job_does_not_exist(job_id: str) -> None:
    with transaction() as session:
        other = auth.tenant_named(session, "other").id
        for look in (jobs.get, jobs.cancel, jobs.artifacts):
            with pytest.raises(NotFound):
                look(session, other, job_id)
        with pytest.raises(NotFound):
            jobs.events(session, other, job_id, 0, 10)
        assert owners.page(session, other, 10) == ([], None)


def test_pages_are_complete_and_newest_first(tenant: str) -> None:
    with transaction() as session:
        made = [jobs.submit(session, tenant, SPEC).id for _ in range(7)]
    seen: list[str] = []
    after = None
    with reading() as session:
        while True:
            found, after = owners.page(session, tenant, 3, after)
            seen += [job.id for job in found]
            if after is None:
                break
        queued, _ = owners.page(session, tenant, 10, None, Filter([Status.QUEUED]))
        ended, _ = owners.page(session, tenant, 10, None, Filter([Status.FAILED]))
    assert seen == sorted(made, reverse=True)
    assert (len(queued), ended) == (7, [])


def test_artifacts_appear_only_with_success(claim: Claim) -> None:
    report = Stored("report.json", "a" * 64, 2, "application/json")
    change(claim.job_id, attempt=2)  # somebody else has it
    with transaction() as session:
        assert not jobs.succeed(session, claim, "sla_met", {}, [report])
        assert session.get(Artifact, (claim.job_id, "report.json")) is None


def test_a_figure_that_is_not_a_number_does_not_reach_the_row(claim: Claim) -> None:
    errors = (StatementError, ValueError)  # psycopg's is not wrapped
    with pytest.raises(errors, match="not JSON compliant"), transaction() as session:
        jobs.succeed(session, claim, "sla_met", {"kl_nats": float("nan")})
    assert read(claim.job_id).status is Status.RUNNING


def _claim_in_a_process(job_id: str) -> bool:
    with transaction() as session:
        return jobs.claim(session, job_id, "worker") is not None


@pytest.mark.slow
def test_claims_of_processes_have_one_winner(tenant: str) -> None:
    with transaction() as session:
        made = [jobs.submit(session, tenant, SPEC).id for _ in range(20)]
    spawn = multiprocessing.get_context("spawn")  # as workers are
    with ProcessPoolExecutor(4, mp_context=spawn) as pool:
        won = list(pool.map(_claim_in_a_process, made * 4))
    assert sum(won) == len(made)
    assert {read(job_id).attempt for job_id in made} == {1}
