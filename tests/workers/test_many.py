"""Several real workers on one job: the same bytes, and nothing lost with one of them."""

import json
import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from api.client import FINAL
from optimizer.run import optimize
from optimizer.spec import OptimizeSpec
from tests.service import BODY, Service, eventually, service, tiny_model

pytestmark = [pytest.mark.service, pytest.mark.slow]

RESULT_S = 500.0  # importing torch on a busy machine is most of it
SMALL = {"calibration_tokens": 3072, "validation_tokens": 256}  # three pieces
SIZED = {**BODY, "data_distribution": {**BODY["data_distribution"], **SMALL}}
# The job's own worker is held up here for as long as a helper needs to load torch.
PATIENT = {"PRECISION_LEASE_S": "300"}


def started(data_dir: Path, workers: int) -> Any:
    tiny_model(data_dir / "models" / "tiny")
    return service(data_dir, "--workers", str(workers), environment=PATIENT)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Service]:
    with started(tmp_path / "three", 3) as running:
        yield running


def report(service: Service, job_id: str) -> dict[str, Any]:
    """Wait for the end of a job, and return its report."""
    assert eventually(lambda: service.client.job(job_id)["status"] in FINAL, RESULT_S)
    job = service.client.job(job_id)
    assert job["status"] == "succeeded", job
    return dict(service.client.report(job_id))


def rows(service: Service, query: str, *values: object) -> list[Any]:
    with closing(sqlite3.connect(service.data_dir / "precision.db")) as database:
        return database.execute(query, values).fetchall()


def own_process(service: Service, job_id: str) -> int:
    ((worker,),) = rows(service, "SELECT worker FROM jobs WHERE id = ?", job_id)
    return int(worker.split(":")[1])


def helpers(service: Service, job_id: str) -> list[tuple[int, str]]:
    """Return process and piece of everybody who helps the job now."""
    running = "SELECT worker, key FROM pieces WHERE job_id = ? AND state = 'running'"
    found = [(int(w.split(":")[1]), key) for w, key in rows(service, running, job_id)]
    own = own_process(service, job_id)
    return [(process, key) for process, key in found if process != own]


def hold(service: Service, process: int) -> None:
    """Stop a process, but not while it has the database locked."""
    path = service.data_dir / "precision.db"
    while True:
        os.kill(process, signal.SIGSTOP)
        try:
            with closing(sqlite3.connect(path, timeout=5.0)) as database:
                database.execute("BEGIN IMMEDIATE")
                return
        except sqlite3.OperationalError:
            os.kill(process, signal.SIGCONT)
            time.sleep(0.1)


def helped(service: Service) -> tuple[str, int, str]:
    """Start a job, and hold its own worker up until a helper has a piece.

    Returns the job, and process and piece of the helper.
    """
    job_id = service.client.optimize(SIZED)["id"]
    waiting = "SELECT 1 FROM pieces WHERE job_id = ? AND state = 'queued'"
    assert eventually(lambda: rows(service, waiting, job_id), RESULT_S)
    own = own_process(service, job_id)
    hold(service, own)
    try:
        found = eventually(lambda: helpers(service, job_id), RESULT_S)
    finally:
        os.kill(own, signal.SIGCONT)
    assert found, "nobody came to help"
    return job_id, *found[0]


def test_three_workers_give_the_bytes_of_one(three: Service) -> None:
    job_id, _, _ = helped(three)
    together = report(three, job_id)
    assert rows(three, "SELECT * FROM pieces") == []
    ((text,),) = rows(three, "SELECT spec FROM jobs WHERE id = ?", job_id)
    # One worker, with another number of threads than each of theirs: the report says so.
    alone = optimize(OptimizeSpec.from_json(json.loads(text)), lambda *at: None)
    for document in (together, alone):
        del document["executed_on"]["threads"]
        for member in ("exported", "integrity"):  # of the service alone
            document.pop(member, None)
    assert together.keys() == alone.keys()
    for member, said in together.items():
        assert json.dumps(said) == json.dumps(alone[member]), member


def test_a_killed_helper_costs_no_attempt_and_only_its_piece(three: Service) -> None:
    job_id, process, key = helped(three)
    os.kill(process, signal.SIGKILL)
    with closing(sqlite3.connect(three.data_dir / "precision.db")) as database:
        database.execute(
            "UPDATE pieces SET heartbeat_at = '2020-01-01 00:00:00.000000' WHERE key = ?",
            (key,),
        )
        database.commit()  # the lease ended
    report(three, job_id)
    assert three.client.job(job_id)["attempt"] == 1
    assert rows(three, "SELECT 1 FROM results WHERE key = ?", key)
