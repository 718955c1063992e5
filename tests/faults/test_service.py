"""Whole programs are killed, stopped and told to go while jobs run: each ends once.

The service is the real one, with two workers whose clocks are an hour ahead, and
without the numerics (`light/sitecustomize.py`).
"""

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import redis

from api import db, queue
from api.client import ClientError
from api.models import IdempotencyKey, Job, JobEvent, Status
from tests.faults.conftest import broker_url, programs
from tests.faults.ends import End, ended, trail
from tests.faults.numerics import ENDS, IS_KILLED
from tests.faults.outages import outages
from tests.service import BODY, Service, eventually, parent, processes

pytestmark = [pytest.mark.service, pytest.mark.slow]


def body(seed: int) -> dict[str, Any]:
    data = {**BODY["data_distribution"], "seed": seed}
    return {**BODY, "data_distribution": data}


def ask(running: Service, tenth_s: int) -> str:
    return str(running.client.optimize(body(tenth_s))["id"])


def busy(job_id: str) -> Job:
    """Wait until a worker is in the middle of the job."""

    def in_the_middle() -> Job | None:
        with db.reading() as session:
            job = session.get_one(Job, job_id)
        return job if job.phase in ("calibrate", "sweep") else None

    job = eventually(in_the_middle, 60)
    assert job is not None, trail(job_id)
    assert job.status is Status.RUNNING, trail(job_id)
    return job


def worker_of(job: Job) -> int:
    """Return the worker that has the job: the parent of the process in the row."""
    assert job.worker is not None
    return parent(int(job.worker.rsplit(":")[-1]))


def succeeded(job_id: str, *, lost: int = 0) -> End:
    end = ended(job_id)
    assert end.job.status is Status.SUCCEEDED, end.job.error
    assert end.job.attempts_lost == lost, trail(job_id)
    return end


def computing(running: Service) -> list[int]:
    return [pid for pid in processes(running.mark) if b"workers.child" in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_killed_worker_takes_its_processes_with_it_and_another_has_the_job(
    running: Service,
) -> None:
    job_id = ask(running, 40)
    os.kill(worker_of(busy(job_id)), signal.SIGKILL)
    assert eventually(lambda: not computing(running), 5)
    assert succeeded(job_id, lost=1).job.attempt == 2
    assert eventually(lambda: len(programs(running, "celery")) == 2)


def test_an_api_that_is_killed_between_commit_and_bell_loses_no_job(
    running: Service,
) -> None:
    flag, key = running.data_dir / "die", uuid4().hex
    (before,) = programs(running, "api.serve")
    flag.touch()
    job_id = running.client.optimize(body(1), key)["id"]
    assert eventually(lambda: programs(running, "api.serve") not in ([before], []))
    assert not flag.exists()
    assert running.client.optimize(body(1), key)["id"] == job_id
    with db.reading() as session:
        assert session.query(IdempotencyKey).filter_by(key=key).count() == 1
    succeeded(job_id)


@contextmanager
def stopped(pid: int) -> Any:
    """A process that is there and answers nobody."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_broker_that_does_not_answer_delays_and_loses_nothing(
    running: Service,
) -> None:
    (broker,) = programs(running, "valkey")
    runs = ask(running, 20)
    busy(runs)
    with stopped(broker):
        waits = ask(running, 1)
        ready = httpx.get(f"{running.address['url']}/readyz", trust_env=False)
        assert (ready.status_code, "degraded" in ready.text) == (200, True), ready.text
        succeeded(runs)
        beats = running.data_dir / "beats"  # no probe ends workers for the broker
        before = beats.stat().st_mtime_ns
        assert eventually(lambda: beats.stat().st_mtime_ns > before)
    succeeded(waits)


def test_a_broker_that_forgets_and_one_that_is_killed_lose_nothing(
    running: Service,
) -> None:
    runs = ask(running, 20)
    busy(runs)
    with redis.Redis.from_url(broker_url(running)) as broker:
        broker.flushall()
    waits = ask(running, 1)
    (pid,) = programs(running, "valkey")
    os.kill(pid, signal.SIGKILL)
    for job_id in (runs, waits):
        succeeded(job_id)
    assert programs(running, "valkey") != [pid]


def test_a_database_that_comes_and_goes_loses_nothing(running: Service) -> None:
    key = uuid4().hex

    def accepted() -> str | None:
        try:
            return str(running.client.optimize(body(1), key)["id"])
        except ClientError as error:
            if error.status != 503:
                raise
            return None

    runs = ask(running, 20)
    with outages():
        asked_for = eventually(accepted, 60)
        time.sleep(3.0)
    for job_id in (runs, asked_for):
        assert ended(job_id).job.status is Status.SUCCEEDED


def test_a_message_that_comes_again_and_again_starts_nothing_twice(
    running: Service,
) -> None:
    """The job is longer than the visibility timeout."""
    heard, forget = taken(running), running.data_dir / "forget"
    forget.touch()
    try:
        job_id = ask(running, 50)
        busy(job_id)
        assert eventually(lambda: taken(running) > heard, 60)  # the message came again
        assert succeeded(job_id).count("job.started") == 1
    finally:
        forget.unlink()


def test_many_bells_for_one_job_start_it_once(running: Service) -> None:
    heard = taken(running)
    job_id = ask(running, 20)
    for _ in range(2):
        queue.ring(job_id)
    assert succeeded(job_id).count("job.started") == 1
    assert eventually(lambda: taken(running) - heard >= 2, 60)


def taken(running: Service) -> int:
    """Return how many bells found nothing to take."""
    logs = (running.data_dir / "logs").glob("worker*.log")
    return sum(log.read_text().count("is taken, finished, or has") for log in logs)


def test_workers_whose_clocks_are_an_hour_ahead_change_no_time(
    running: Service,
) -> None:
    job_id = ask(running, 1)
    job = succeeded(job_id).job
    log = (running.data_dir / "logs" / "worker.log").read_text()
    said = re.findall(r'"timestamp": "([^"]+)Z?"', log)[-1].removesuffix("Z")
    ahead = datetime.fromisoformat(said).replace(tzinfo=UTC) - datetime.now(UTC)
    assert timedelta(minutes=50) < ahead < timedelta(minutes=70)
    with db.reading() as session:
        told = session.query(JobEvent).filter_by(job_id=job_id)
        times = [event.at for event in told]
    assert job.finished_at is not None
    for at in (job.created_at, job.finished_at, *times):
        assert abs(datetime.now(UTC) - at) < timedelta(minutes=5)


def test_a_worker_that_is_asked_to_go_ends_its_job_first(running: Service) -> None:
    job_id = ask(running, 25)
    worker = worker_of(busy(job_id))
    os.kill(worker, signal.SIGTERM)
    assert succeeded(job_id).job.attempt == 1
    assert eventually(gone(worker), 20)


def test_a_worker_that_is_told_to_go_gives_its_job_back(running: Service) -> None:
    job_id = ask(running, 60)
    worker = worker_of(busy(job_id))
    os.kill(worker, signal.SIGQUIT)
    assert eventually(gone(worker), 20)
    end = succeeded(job_id)  # no attempt was lost, though it was started twice
    assert (end.job.attempt, end.count("job.queued")) == (2, 2)


def gone(pid: int) -> Callable[[], bool]:
    return lambda: b"celery" not in _command(pid)


def test_jobs_that_always_die_are_given_up_and_the_next_one_runs(
    running: Service,
) -> None:
    """One ends its process without a word, one is killed as the kernel does it."""
    found = {ENDS: ("worker_lost", 2), IS_KILLED: ("device_out_of_memory", 1)}
    poison = {seed: ask(running, seed) for seed in found}
    next_one = ask(running, 1)
    for seed, (code, attempts) in found.items():
        end = ended(poison[seed])
        assert end.job.error is not None
        assert (end.job.error["code"], end.job.attempt) == (code, attempts)
    succeeded(next_one)
