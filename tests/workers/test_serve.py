"""The whole service as one command, with a real broker, a real worker and a real model."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from api import operate
from api.client import FINAL
from tests.service import (
    BODY,
    FAST,
    MARK,
    Service,
    eventually,
    processes,
    service,
    tiny_model,
)

pytestmark = [pytest.mark.service, pytest.mark.slow]

RESULT_S = 240.0  # importing torch on a busy machine is most of it


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    tiny_model(tmp_path / "models" / "tiny")
    return tmp_path


@pytest.fixture
def running(data_dir: Path) -> Iterator[Service]:
    with service(data_dir) as started:
        yield started


def until(service: Service, job_id: str, *states: str) -> dict[str, Any]:
    def reached() -> dict[str, Any] | None:
        job = service.client.job(job_id)
        return job if job["status"] in {*states, *FINAL} else None

    job = eventually(reached, RESULT_S)
    assert job is not None, "no end in sight"
    return dict(job)


def sum_of(service: Service, series: str) -> float:
    """Return the sum of the samples of `/metrics` whose name and labels fit a pattern."""
    text = httpx.get(f"{service.address['url']}/metrics", trust_env=False).text
    return sum(float(x) for x in re.findall(rf"^{series} (\S+)$", text, re.MULTILINE))


def kill(find: Callable[[], int | None]) -> int:
    """Kill a process when it is there, as the kernel does when memory is short."""
    child = eventually(find)
    assert child is not None
    os.kill(child, signal.SIGKILL)
    return int(child)


def test_a_killed_worker_ends_in_a_second_attempt_and_one_success(
    running: Service,
) -> None:
    job_id = running.client.optimize(BODY)["id"]
    assert until(running, job_id, "running")["status"] == "running"
    computing = eventually(running.compute_child)
    kill(running.pool_child)
    assert eventually(lambda: not Path(f"/proc/{computing}").exists(), 10)
    job = until(running, job_id)
    assert (job["status"], job["attempt"]) == ("succeeded", 2), job["error"]
    measured = sum_of(running, 'precision_trials_total{precision=.*,result="measured"}')
    assert measured == sum_of(running, "precision_trial_seconds_count") > 10
    assert 0 < sum_of(running, "precision_trial_seconds_sum") < RESULT_S
    types = [event["type"] for event in running.client.events(job_id)]
    assert types.count("job.attempt_lost") == types.count("job.succeeded") == 1
    lines = [
        e["data"]["message"]
        for e in running.client.events(job_id)
        if e["type"] == "job.log"
    ]
    assert any(line.startswith("Read ") for line in lines)
    assert any(line.startswith("Measured ") for line in lines)
    # one set of artifacts: what the dead attempt may have left is nobody's
    assert running.client.report(job_id)["schema"] == "precision.report/1"
    assert job["result"]["outcome"] in {"sla_met", "sla_not_met", "no_improvement"}
    percents = [
        e["data"]["percent"]
        for e in running.client.events(job_id)
        if "percent" in e["data"]
    ]
    assert percents == sorted(percents)
    assert max(percents) < 100


def test_a_killed_process_that_computes_is_run_again_with_less_memory(
    running: Service,
) -> None:
    job_id = running.client.optimize(BODY)["id"]
    computing = eventually(running.compute_child)
    environment = Path(f"/proc/{computing}/environ").read_bytes()
    for name in (b"PRECISION_BROKER_URL", b"PRECISION_DATABASE_URL", b"redis://"):
        assert name not in environment
    kill(running.compute_child)
    job = until(running, job_id)
    assert (job["status"], job["attempt"]) == ("succeeded", 1), job["error"]
    events = running.client.events(job_id)
    (warning,) = [e["data"] for e in events if e["type"] == "job.warning"]
    assert warning["code"] == "run_with_less_memory"
    assert list((running.data_dir / "work").iterdir()) == []


def test_a_cancel_is_seen_within_five_seconds(running: Service) -> None:
    job_id = running.client.optimize(BODY)["id"]
    eventually(lambda: running.client.job(job_id)["phase"] not in (None, "load"), 120)
    began = time.monotonic()
    running.client.cancel(job_id)
    job = until(running, job_id)
    assert job["status"] == "cancelled"
    assert time.monotonic() - began < 5
    assert job["progress"]["percent"] < 100


def test_a_killed_supervisor_leaves_no_process_behind(running: Service) -> None:
    job_id = running.client.optimize(BODY)["id"]
    until(running, job_id, "running")
    assert eventually(running.pool_child) is not None
    assert len(processes(running.mark)) >= 5  # with broker, api, worker and its child
    running.process.kill()
    running.process.wait()
    assert eventually(lambda: not processes(running.mark), 10), processes(running.mark)


def test_sigterm_ends_everything_in_seconds_and_the_job_goes_on_after_the_restart(
    data_dir: Path,
) -> None:
    with service(data_dir) as first:
        job_id = first.client.optimize(BODY)["id"]
        waiting = first.client.optimize(BODY)["id"]
        until(first, job_id, "running")
        began = time.monotonic()
        assert first.stop(signal.SIGTERM) == 0
        assert time.monotonic() - began < 10
        assert processes(first.mark) == []
        key = first.key
    with service(data_dir) as second:
        assert second.key == key
        for queued in (job_id, waiting):
            assert until(second, queued)["status"] == "succeeded"
        lost = [
            e for e in second.client.events(job_id) if e["type"] == "job.attempt_lost"
        ]
        assert lost == []  # it was given back: no attempt was used up
        assert second.stop(signal.SIGINT) == 0


def test_a_broker_that_forgets_everything_loses_no_job(running: Service) -> None:
    pids = running.address["children"]
    os.kill(pids["worker"], signal.SIGSTOP)  # nobody hears the first bell
    job_id = running.client.optimize(BODY)["id"]
    os.kill(pids["broker"], signal.SIGKILL)
    os.kill(pids["worker"], signal.SIGCONT)
    assert until(running, job_id)["status"] == "succeeded"
    assert "broker ended with signal SIGKILL" in running.output.read_text()


def test_a_killed_api_comes_back_on_the_same_port(running: Service) -> None:
    os.kill(running.address["children"]["api"], signal.SIGKILL)
    assert running.client.models()[0]["name"] == "tiny"


def test_the_key_is_the_owners_alone_and_works(running: Service) -> None:
    assert (running.data_dir / "api_key").stat().st_mode & 0o777 == 0o600
    url = f"{running.address['url']}/v1/models"
    assert httpx.get(url, trust_env=False).status_code == 401
    assert running.key in running.output.read_text()


def test_a_second_service_on_the_same_data_is_refused(running: Service) -> None:
    end = serve_once(running.data_dir)
    assert end.returncode == 1
    assert "runs on" in end.stderr
    assert "--data-dir" in end.stderr


def test_a_port_in_use_is_named(data_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        end = serve_once(data_dir, "--port", str(port))
    assert end.returncode == 1
    assert f"127.0.0.1:{port}" in end.stderr
    assert "Traceback" not in end.stderr


def test_the_demo_shows_a_stack_saves_its_report_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    tiny_model(tmp_path / "models" / operate.DEMO["model"])  # small under a big name
    mark = uuid4().hex
    end = subprocess.run(
        [sys.executable, "-m", "api.cli", "demo", "--data-dir", str(tmp_path)],
        env={**os.environ, MARK: mark, "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=RESULT_S,
        check=False,
    )
    assert end.returncode == 0, end.stderr
    assert "lm_head" in end.stdout
    assert "the job took" in end.stdout
    page = Path(end.stdout.rsplit("report:", 1)[1].strip())
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")
    assert "load" in end.stderr  # the progress
    assert processes(mark) == []


def serve_once(data_dir: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "api.cli", "serve", "--data-dir", str(data_dir)]
    return subprocess.run(
        [*command, *options],
        env={**os.environ, **FAST},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
