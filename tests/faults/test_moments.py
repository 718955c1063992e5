"""A worker dies, or hears too much, at any moment: each job ends once, and whole."""

import os
import signal
import time
from datetime import UTC, datetime

import pytest
from sqlalchemy import update

from api import db, pieces, queue, storage, sweeps
from api.models import HELD, Job, JobPiece, Status
from tests.faults import worker
from tests.faults.conftest import submit
from tests.faults.ends import ended, no_pieces_are_left, status, trail
from tests.faults.outages import outages
from tests.service import eventually

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.usefixtures("patient")]

PAST = datetime(2020, 1, 1, tzinfo=UTC)
KILLED = -signal.SIGKILL


def end_leases() -> None:
    """As if every worker that has a job were silent for long."""
    with db.transaction() as session:
        held = update(Job).where(Job.status.in_(HELD))
        session.execute(held.values(lease_expires_at=PAST))
        session.execute(update(JobPiece).values(heartbeat_at=PAST))
    with db.transaction() as session:
        sweeps.sweep(session)


def running() -> bool:
    with db.reading() as session:
        return session.query(Job).filter_by(status=Status.RUNNING).count() > 0


@pytest.mark.parametrize("at", range(0, len(worker.DEADLY), 7))
def test_a_killed_worker_costs_an_attempt_at_most(at: int) -> None:
    moments = worker.DEADLY[at : at + 7]
    made = [submit(tenth_s=10) for _ in moments]  # beats, and each tells of progress
    codes = worker.finish(*[worker.start(moment) for moment in moments])
    assert codes == [KILLED] * len(moments), dict(zip(moments, codes, strict=True))
    end_leases()
    left = [job_id for job_id in made if status(job_id) is Status.QUEUED]
    expected = len(moments) - ("it has succeeded" in moments)
    assert len(left) == expected, [(status(i), trail(i)[-1]) for i in made]
    assert worker.finish(*[worker.start() for _ in left]) == [0] * len(left)
    ends = [ended(job_id) for job_id in made]
    assert {end.job.status for end in ends} == {Status.SUCCEEDED}
    assert max(end.job.attempt for end in ends) <= 2
    with db.transaction() as session:
        pieces.sweep(session, queue.names())
    assert no_pieces_are_left()


def test_a_job_that_kills_every_worker_fails_and_leaves_nothing() -> None:
    job_id = submit()
    for _ in range(2):
        assert worker.finish(worker.start("one file is stored")) == [KILLED]
        end_leases()
    assert worker.finish(worker.start()) == [0]  # nothing is left to take
    end = ended(job_id)
    assert end.job.status is Status.FAILED
    assert end.job.error is not None
    assert end.job.error["code"] == "worker_lost"
    assert end.count("job.attempt_lost") == 2


def test_two_workers_that_hear_one_bell_do_the_work_once() -> None:
    job_id = submit(tenth_s=5)
    workers = [worker.start() for _ in range(4)]
    assert worker.finish(*workers) == [0] * 4
    assert ended(job_id).count("job.started") == 1


def test_a_worker_that_was_given_up_for_dead_changes_nothing() -> None:
    """It is stopped, loses its job to another one, and wakes up."""
    job_id = submit(tenth_s=10)
    slow = worker.start()
    assert eventually(running, 60)
    time.sleep(0.3)
    hold(slow.pid)
    end_leases()
    assert worker.finish(worker.start()) == [0]
    os.kill(slow.pid or 0, signal.SIGCONT)
    worker.finish(slow)
    end = ended(job_id)
    assert (end.job.status, end.job.attempt) == (Status.SUCCEEDED, 2)


IN_TRANSACTION = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
    AND xact_start IS NOT NULL
"""


def hold(pid: int | None) -> None:
    """Stop a process, but not while it holds SQLite's one lock, or that of a row."""
    assert pid is not None
    while True:
        os.kill(pid, signal.SIGSTOP)
        with db.engine().connect() as connection:
            if connection.dialect.name == "postgresql":
                if not connection.exec_driver_sql(IN_TRANSACTION).scalar():
                    return
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.1)
                continue
            connection.exec_driver_sql("ROLLBACK")
            connection.exec_driver_sql("PRAGMA busy_timeout=500")
            try:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                return
            except Exception:
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.1)
            finally:
                connection.invalidate()


def test_a_disk_that_is_full_fails_the_job_and_leaves_no_file() -> None:
    job_id = submit()
    assert worker.finish(worker.start("the disk is full")) == [0]
    end = ended(job_id)
    assert end.job.error is not None
    assert end.job.error["code"] == "storage_write_failed"
    assert (end.job.error["category"], end.job.error["retryable"]) == ("platform", True)
    with pytest.raises(FileNotFoundError):
        storage.store().read(storage.key(job_id, 1, "report.json"))


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_bucket_has_the_files_of_a_job_and_one_that_is_away_fails_it(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = submit()
    assert worker.finish(worker.start("one file is stored")) == [KILLED]
    end_leases()
    assert worker.finish(worker.start()) == [0]
    assert ended(stored).job.status is Status.SUCCEEDED  # its files are read there
    monkeypatch.setenv("PRECISION_STORAGE_URL", "s3://no-such-bucket/x")
    lost = submit()
    assert worker.finish(worker.start()) == [0]
    error = ended(lost).job.error
    assert error is not None
    assert (error["code"], error["retryable"]) == ("storage_write_failed", True)


def test_a_database_that_comes_and_goes_costs_no_attempt() -> None:
    job_id = submit(tenth_s=30)
    with outages():
        worker.finish(process := worker.start())
    assert process.exitcode == 0, trail(job_id)
    end = ended(job_id)
    assert (end.job.status, end.job.attempt) == (Status.SUCCEEDED, 1)


def test_a_job_that_waited_too_long_is_not_started() -> None:
    job_id = submit(expires_at=PAST)
    assert worker.finish(worker.start()) == [0]
    end_leases()
    assert ended(job_id).job.status is Status.EXPIRED


def test_a_job_that_takes_too_long_is_ended() -> None:
    job_id = submit(tenth_s=100, run_limit_s=0.5)
    assert worker.finish(worker.start()) == [0]
    error = ended(job_id).job.error
    assert error is not None
    assert error["code"] == "deadline_exceeded"
