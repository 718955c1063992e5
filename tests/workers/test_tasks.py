"""What the worker does with a job, with the numerics replaced at their one entrance."""

import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from api import (
    auth,
    db,
    jobs,
    queue,
    settings,
    signatures,
    storage,
    views,
    watched,
)
from api.models import Artifact, Job, JobEvent, Status
from api.transitions import Claim
from optimizer.document_provenance import code_sha256
from optimizer.errors import DatasetError, NonFiniteError
from optimizer.pieces import Piece, Pieces, key_of
from optimizer.spec import OptimizeSpec
from tests.optimizer.example_document import example_document
from tests.workers import in_thread
from workers import app, device, patience, tasks
from workers.beat import Beat, Progress
from workers.tasks import Meter, run_job

SPEC = OptimizeSpec("tiny", "/models/tiny", "0" * 64, "h100")
DOCUMENT = example_document(layers=2)

Progressing = Callable[..., None]
Optimize = Callable[[OptimizeSpec, Progressing, Pieces], Any]


@pytest.fixture
def optimizer(
    sqlite: object, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Optimize], None]:
    """Put a function in the place of `optimizer.run.optimize`."""
    monkeypatch.setenv("PRECISION_BEAT_S", "0.1")
    in_thread.use(monkeypatch)
    run, torch = ModuleType("optimizer.run"), ModuleType("torch")
    torch.set_num_threads = lambda count: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "optimizer.run", run)
    monkeypatch.setitem(sys.modules, "torch", torch)  # seconds to import

    def put(optimize: Optimize) -> None:
        def run_it(
            spec: OptimizeSpec,
            progress: Progressing,
            pieces: Pieces,
            profile: object,
            outlet: object,
            *told: object,
        ) -> Any:
            assert profile is None  # nobody measured an H100 here
            return optimize(spec, progress, pieces)

        run.optimize = run_it  # type: ignore[attr-defined]

    return put


def submit() -> str:
    with db.transaction() as session:
        tenant = auth.tenant_named(session, "acme").id
        return jobs.submit(session, tenant, SPEC).id


def read(job_id: str) -> Job:
    with db.reading() as session:
        return session.get_one(Job, job_id)


def artifacts(job_id: str) -> list[Artifact]:
    with db.reading() as session:
        return list(session.query(Artifact).filter_by(job_id=job_id))


def history(job_id: str) -> list[str]:
    with db.reading() as session:
        found = session.query(JobEvent).filter_by(job_id=job_id)
        return [event.type for event in found.order_by(JobEvent.seq)]


def cancel(job_id: str) -> None:
    with db.transaction() as session:
        tenant = auth.tenant_named(session, "acme").id
        jobs.cancel(session, tenant, job_id)


def claimed(job_id: str) -> Claim:
    with db.transaction() as session:
        claim = jobs.claim(session, job_id, "test")
    assert claim is not None
    return claim


def test_a_finished_job_says_what_computed_it(
    optimizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '580.65.06, GPU-1'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    device.identity.cache_clear()
    optimizer(lambda spec, progress, pieces: DOCUMENT)
    job_id = submit()
    assert views.job(read(job_id)).provenance is None
    run_job(job_id)
    said = views.job(read(job_id)).provenance
    device.identity.cache_clear()
    assert said is not None
    assert said.service_version == said.versions["precision"]
    assert said.torch == said.versions["torch"] == metadata.version("torch")
    assert said.code_sha256 == code_sha256()
    assert (said.seed, said.driver) == (SPEC.seed, "580.65.06")
    assert said.device_uuid_hash == hashlib.sha256(b"GPU-1").hexdigest()


def test_a_job_ends_with_its_outcome_and_its_artifacts(optimizer: Any) -> None:
    optimizer(lambda spec, progress, pieces: DOCUMENT)
    job_id = submit()
    run_job(job_id)
    job = read(job_id)
    assert (job.status, job.percent) == (Status.SUCCEEDED, 100.0)
    assert job.outcome == DOCUMENT["verdict"]["outcome"]
    assert job.summary is not None
    assert job.summary["chosen"]["front_id"] == DOCUMENT["verdict"]["chosen"]
    assert [a.name for a in artifacts(job_id)] == [
        "layers.csv",
        "report.html",
        "report.json",
        "report.md",
        "report.pdf",
        "stack.json",
    ]
    stored = json.loads(storage.store().read(storage.key(job_id, 1, "report.json")))
    assert {k: v for k, v in stored.items() if k != "integrity"} == DOCUMENT
    said = signatures.verify(stored, signatures.public_key())
    page = storage.store().read(storage.key(job_id, 1, "report.html")).decode()
    assert said["sha256"] in page
    assert re.search(r"report, made 20\d\d-\d\d-\d\d \d\d:\d\d UTC<", page)
    stack = json.loads(storage.store().read(storage.key(job_id, 1, "stack.json")))
    assert stack["stack"] == {s["site"]: s["choice"] for s in DOCUMENT["sites"]}
    assert stack["padding"] == {}
    kinds = {a.name: a.kind for a in artifacts(job_id)}
    assert kinds.pop("stack.json") == "stack"
    assert set(kinds.values()) == {"report"}


def test_the_second_bell_finds_the_job_taken(optimizer: Any) -> None:
    calls: list[OptimizeSpec] = []
    optimizer(lambda spec, progress, pieces: calls.append(spec) or DOCUMENT)
    job_id = submit()
    run_job(job_id)
    run_job(job_id)
    assert calls == [SPEC]
    assert history(job_id).count("job.started") == 1


def test_a_refusal_of_the_optimizer_reaches_the_owner_in_full(optimizer: Any) -> None:
    def optimize(spec: OptimizeSpec, progress: Progressing, pieces: Pieces) -> None:
        progress("calibrate", 0.0, "")
        raise DatasetError("3 samples, 16 are needed")

    optimizer(optimize)
    job_id = submit()
    run_job(job_id)
    assert read(job_id).status is Status.FAILED
    assert read(job_id).error == {
        "code": "calibration_data_empty",
        "category": "user",
        "retryable": False,
        "message": "3 samples, 16 are needed",
        "phase": "calibrate",
    }


def test_a_measurement_that_ends_the_job_is_counted(optimizer: Any) -> None:
    asked = Piece("sweep", key_of("sweep"), {"family": "int8"})

    def compute(piece: Piece) -> dict[str, Any]:
        raise NonFiniteError("layers.3.ffn_out, sample 2")

    def optimize(spec: OptimizeSpec, progress: Progressing, pieces: Pieces) -> None:
        pieces.run([asked], compute, lambda done, planned: None)

    optimizer(optimize)
    job_id = submit()
    run_job(job_id)
    assert read(job_id).status is Status.FAILED
    with db.reading() as session:
        assert watched.counted(session) == {("failed", "int8"): 1}


def test_a_defect_is_logged_and_its_secrets_stay_in_the_log(
    optimizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def optimize(spec: OptimizeSpec, progress: Progressing, pieces: Pieces) -> None:
        raise KeyError("password=hunter2")

    optimizer(optimize)
    job_id = submit()
    with caplog.at_level(logging.ERROR):
        run_job(job_id)
    error = read(job_id).error
    assert error is not None
    assert (error["code"], error["retryable"]) == ("internal_error", True)
    assert "hunter2" not in json.dumps(error)
    assert "hunter2" in caplog.text


def test_a_job_ends_at_its_own_limit(optimizer: Any) -> None:
    def optimize(spec: OptimizeSpec, progress: Progressing, pieces: Pieces) -> None:
        for step in range(1000):
            time.sleep(0.05)
            progress("sweep", step / 1000, "")

    optimizer(optimize)
    job_id = submit()
    with db.transaction() as session:
        session.get_one(Job, job_id).run_limit_s = 0.5
    began = time.monotonic()
    run_job(job_id)
    assert time.monotonic() - began < 10
    error = read(job_id).error
    assert error is not None
    assert (error["code"], error["category"]) == ("deadline_exceeded", "user")
    assert error["phase"] == "sweep"


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"),
    ],
    ids=["python", "cuda", "cpu"],
)
def test_memory_that_ran_out_is_named(error: BaseException) -> None:
    assert tasks.explain(error, "sweep")["code"] == "device_out_of_memory"


def test_a_database_that_stays_away_costs_an_attempt_and_not_the_job(
    optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> bool:
        raise OperationalError("UPDATE", None, Exception("connection refused"))

    optimizer(lambda spec, progress, pieces: DOCUMENT)
    monkeypatch.setattr(patience, "TRIES", 1)
    with monkeypatch.context() as outage:
        outage.setattr(jobs, "finalize", away)
        job_id = submit()
        run_job(job_id)
    assert (read(job_id).status, read(job_id).attempts_lost) == (Status.QUEUED, 1)
    run_job(job_id)
    assert read(job_id).status is Status.SUCCEEDED


def test_a_report_that_is_not_json_is_no_success(optimizer: Any) -> None:
    optimizer(lambda spec, progress, pieces: {**DOCUMENT, "limits": [float("nan")]})
    job_id = submit()
    run_job(job_id)
    assert read(job_id).status is Status.FAILED
    assert artifacts(job_id) == []


def test_a_cancel_is_seen_within_five_seconds(optimizer: Any) -> None:
    cancelled_at = 0.0
    job_id = submit()

    def optimize(spec: OptimizeSpec, progress: Progressing, pieces: Pieces) -> None:
        nonlocal cancelled_at
        progress("sweep", 0.1, "")
        cancel(job_id)
        cancelled_at = time.monotonic()
        while time.monotonic() < cancelled_at + 30:
            time.sleep(0.05)
            progress("sweep", 0.5, "")

    optimizer(optimize)
    run_job(job_id)
    assert time.monotonic() - cancelled_at < 5
    assert read(job_id).status is Status.CANCELLED
    assert read(job_id).percent < 100


def test_a_worker_given_up_for_dead_changes_nothing(optimizer: Any) -> None:
    job_id = submit()

    def optimize(spec: OptimizeSpec, progress: Progressing, pieces: Pieces) -> Any:
        with db.transaction() as session:  # another gave us up, and a third began
            session.get_one(Job, job_id).status = Status.QUEUED
        claimed(job_id)
        return DOCUMENT

    optimizer(optimize)
    run_job(job_id)
    job = read(job_id)
    assert (job.status, job.attempt, job.summary) == (Status.RUNNING, 2, None)
    assert artifacts(job_id) == []


def test_a_job_beats_while_one_long_kernel_runs(optimizer: Any) -> None:
    leases: list[Any] = []
    job_id = submit()

    def optimize(spec: OptimizeSpec, progress: Progressing, pieces: Pieces) -> Any:
        for _ in range(2):
            leases.append(read(job_id).lease_expires_at)
            time.sleep(0.7)  # the beat looks up every half second
        return DOCUMENT

    optimizer(optimize)
    run_job(job_id)
    assert leases[0] < leases[1]


def test_a_job_that_does_not_stop_is_left_within_five_seconds(optimizer: Any) -> None:
    left, codes = threading.Event(), []
    job_id = submit()

    def leave(code: int) -> None:
        codes.append(code)
        left.set()

    with Beat(claimed(job_id), leave=leave):
        cancel(job_id)
        assert left.wait(5)
    assert codes[0] == 1
    assert read(job_id).status is Status.CANCELLED


def test_the_last_word_of_every_phase_reaches_the_row(optimizer: Any) -> None:
    job_id = submit()
    with Beat(claimed(job_id)) as beat:
        for phase, percent in (("load", 1.0), ("load", 5.0), ("calibrate", 7.0)):
            beat.tell(Progress(phase, percent, 9.0))
        time.sleep(1.1)
    job = read(job_id)
    assert (job.phase, job.percent, job.eta_s) == ("calibrate", 7.0, 9.0)
    assert history(job_id).count("job.phase_changed") == 2


def test_percent_by_hand() -> None:
    now = 0.0
    meter = Meter(clock=lambda: now)
    # load 4 + half of calibrate's 8; 8 % took 16 s, so 92 % take 184 s
    now = 16.0
    assert meter.read("calibrate", 0.5) == Progress("calibrate", 8.0, 184.0)
    # an earlier place does not take the percentage back
    assert meter.read("load", 1.0).percent == 8.0
    assert meter.read("report", 1.0).percent == 100.0


def test_the_shares_of_the_phases_add_up() -> None:
    assert sum(tasks.PHASES.values()) == 100


def test_the_sweep_rings_once_for_what_waits(sqlite: object) -> None:
    app.sweep()
    assert not queue.rings("h100")  # nothing waits
    submit()
    submit()
    for _ in range(3):
        app.sweep()
    with queue.producer().connection_for_read() as connection:
        bells = connection.SimpleQueue(queue.DEFAULT)
        assert bells.qsize() == 1  # they do not pile up
        bells.get(timeout=1).ack()
    app.sweep()
    assert queue.rings("h100")


@pytest.mark.parametrize("version", ["5.6.2", "4.9"])
def test_a_celery_that_loses_messages_is_refused(version: str) -> None:
    with pytest.raises(RuntimeError, match=version):
        app.require("celery", version)


@pytest.mark.parametrize("longest_s", ["60", "86400"])
def test_a_bell_is_heard_once_and_never_while_its_job_runs(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, longest_s: str
) -> None:
    """Redis gives out again what is not acknowledged in time; Celery, what it rejects."""
    monkeypatch.setenv("PRECISION_RUN_LIMIT_S", longest_s)
    settings.settings.cache_clear()
    conf = app.create_app().conf
    seen_again_s = conf.broker_transport_options["visibility_timeout"]
    assert seen_again_s > conf.task_time_limit > conf.task_soft_time_limit
    assert conf.task_soft_time_limit > float(longest_s)
    assert conf.task_acks_late
    assert conf.task_acks_on_timeout
    assert not conf.task_reject_on_worker_lost
    assert conf.task_ignore_result
    assert conf.accept_content == ["json"]
    # One job in a process of its own, and none that waits behind it.
    pool = (conf.worker_concurrency, conf.worker_max_tasks_per_child)
    assert (*pool, conf.worker_prefetch_multiplier) == (1, 1, 1)
    assert conf.worker_pool_start_method == "spawn"


def test_the_parent_of_the_pool_never_loads_torch() -> None:
    code = (
        "import sys, workers.app, workers.tasks;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
