"""A process that a model took over, behind the real walls, and what becomes of its job."""

import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest

from api import auth, db, jobs, settings, storage
from api.models import Artifact, Job, JobEvent, KeptResult, Status
from optimizer.spec import OptimizeSpec
from tests.service import eventually
from tests.workers.rogue import MEASURED
from workers import relay, workdir
from workers.channel import LINE_CHARACTERS
from workers.child import LOSSES_TOLD
from workers.pieces import LINES, MOST_STACKS
from workers.printed import EXCERPT_CHARACTERS
from workers.tasks import run_job

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has the walls")
LIMIT_BYTES = 250 * 10**6


@pytest.fixture(autouse=True)
def rogue(
    sqlite: Path, bells: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Compute with `tests.workers.rogue`; nothing of it is left in the end."""
    command = (sys.executable, "-P", "-m", "tests.workers.rogue")
    monkeypatch.setattr(relay, "COMMAND", command)
    monkeypatch.setenv("PRECISION_BEAT_S", "0.1")
    monkeypatch.setenv("PRECISION_JOB_MEMORY_BYTES", str(LIMIT_BYTES))
    monkeypatch.setenv("PRECISION_SECRET", "hunter2")
    settings.settings.cache_clear()
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield sqlite
    assert list((sqlite / "work").iterdir()) == []
    after = psutil.Process().children(recursive=True)
    assert [p for p in after if p.pid not in before] == []
    lost = [p for p in psutil.process_iter(["cmdline"]) if _is_rogue(p)]
    assert lost == []


def _is_rogue(process: psutil.Process) -> bool:
    command = process.info["cmdline"] or [""]
    return "tests.workers.rogue" in command and command[-1] == str(os.getpid())


def submit(deed: str, **changes: Any) -> str:
    spec = OptimizeSpec(deed, "/models/tiny", "0" * 64, "h100")
    with db.transaction() as session:
        tenant = auth.tenant_named(session, "acme").id
        return jobs.submit(session, tenant, replace(spec, **changes)).id


def run(deed: str, **changes: Any) -> Job:
    job_id = submit(deed, **changes)
    run_job(job_id)
    return read(job_id)


def read(job_id: str) -> Job:
    with db.reading() as session:
        return session.get_one(Job, job_id)


def error(job: Job) -> dict[str, Any]:
    assert job.status is Status.FAILED, job.status
    assert job.error is not None
    return dict(job.error)


def history(job: Job) -> list[str]:
    with db.reading() as session:
        found = session.query(JobEvent).filter_by(job_id=job.id)
        return [event.type for event in found.order_by(JobEvent.seq)]


def artifacts(job: Job) -> list[str]:
    with db.reading() as session:
        return [a.name for a in session.query(Artifact).filter_by(job_id=job.id)]


def test_it_sees_no_secret_and_reaches_nothing(rogue: Path) -> None:
    model, secret = rogue / "models" / "tiny", rogue / "secret"
    model.mkdir(parents=True)
    secret.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        job = run(
            "look_around",
            model_path=str(model),
            task=str(secret),
            data_distribution=str(port),
        )
    assert job.status is Status.SUCCEEDED, job.error
    key = storage.key(job.id, 1, "facts.json")
    facts = json.loads(storage.store().read(key))
    for name in ("read", "write", "create", "delete", "list", "workers_environment"):
        assert facts[name] == "PermissionError", name
    assert "done" not in (facts["connect"], facts["link"], facts["workers_memory"])
    assert facts["loopback"] == facts["model"] == facts["own_file"] == "done"
    assert facts["program"] == "hi\n"
    assert facts["umask"] == 0o077
    environment = facts["environment"]
    assert not [name for name in environment if name.startswith("PRECISION_")]
    assert "hunter2" not in json.dumps(facts)
    assert environment["HF_HUB_OFFLINE"] == environment["TRANSFORMERS_OFFLINE"] == "1"
    assert str(rogue / "work") in environment["HOME"]
    assert facts["cwd"] == environment["TMPDIR"] == environment["HOME"]
    opened = [what for what in facts["descriptors"].values() if "/proc/" not in what]
    assert not [w for w in opened if not w.startswith(("pipe:", "/dev/null"))], opened
    assert secret.read_text() == "secret"


def test_no_secret_is_anywhere_in_its_memory(
    rogue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "hunter2-and-more"
    monkeypatch.setenv("PRECISION_SECRET_KEY", secret)
    monkeypatch.setenv("PRECISION_RATE_LIMIT_URL", f"redis://:{secret}@127.0.0.1:1/0")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    settings.settings.cache_clear()
    assert settings.settings().secret_key.get_secret_value() == secret
    model = rogue / "models" / "tiny"
    model.mkdir(parents=True)
    (model / "needle").write_text(secret[::-1])
    job = run("search_memory", model_path=str(model))
    assert job.status is Status.SUCCEEDED, job.error
    facts = json.loads(storage.store().read(storage.key(job.id, 1, "facts.json")))
    assert facts["secret"] == 0
    assert facts["known"] > 0
    assert facts["bytes"] > 10**6


@pytest.mark.parametrize(
    "deed",
    [
        "junk",
        "huge",
        "no_json",
        "flood",
        "unknown",
        "pickle",
        "steal",
        "odd_name",
        "babble",
        "escape",
        "long_line",
    ],
)
def test_what_is_no_message_ends_the_job_and_not_the_worker(deed: str) -> None:
    told = error(run(deed))
    assert (told["code"], told["category"]) == ("untrusted_process", "platform")
    assert "operator" in told["message"]
    assert error(run("junk"))  # the worker goes on


def test_stacks_are_told_of_as_they_are_measured_up_to_a_limit() -> None:
    job = run("boast")
    assert job.status is Status.SUCCEEDED, job.error
    with db.reading() as session:
        found = session.query(JobEvent).filter_by(
            job_id=job.id, type="job.trial_completed"
        )
        told = [event.details for event in found]
    assert len(told) == MOST_STACKS
    assert told[0]["kl_nats"] == MEASURED["kl_nats"]
    assert told[0]["status"] == "running"


def lines_of(job: Job) -> list[str]:
    with db.reading() as session:
        found = session.query(JobEvent).filter_by(job_id=job.id, type="job.log")
        return [event.details["message"] for event in found.order_by(JobEvent.seq)]


def test_lines_are_told_as_plain_text_and_a_flood_of_them_is_dropped() -> None:
    job = run("chatter")
    assert job.status is Status.SUCCEEDED, job.error
    first, *others = lines_of(job)
    assert first == (" [31mred  " + "x" * 1000)[:LINE_CHARACTERS]
    assert others[:2] == ["line 0", "line 1"]
    assert LINES <= len(others) + 1 < 4 * LINES  # it took less than four windows
    with db.reading() as session:
        rows = session.query(JobEvent).filter_by(job_id=job.id)
        assert sorted(e.seq for e in rows) == list(range(1, job.last_seq + 1))


def test_a_job_tells_so_many_lines_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.pieces.LINES", 10**6)
    job = run("chatter")
    assert job.status is Status.SUCCEEDED, job.error
    last = f"line {jobs.MOST_LINES - 2}"  # the first is another
    assert (len(lines_of(job)), lines_of(job)[-1]) == (jobs.MOST_LINES, last)


def test_losses_are_told_some_steps_at_a_time() -> None:
    job = run("lose")
    assert job.status is Status.SUCCEEDED, job.error
    with db.reading() as session:
        found = session.query(JobEvent).filter_by(job_id=job.id, type="job.losses")
        told = [event.details for event in found.order_by(JobEvent.seq)]
    assert [event["first"] for event in told] == list(range(0, 24, 24 // LOSSES_TOLD))
    assert told[-1]["losses"] == [1.0, None]
    assert (told[-1]["run"], told[-1]["steps"]) == ("fp16", 24)


def test_memory_that_ran_out_is_tried_again_with_less(rogue: Path) -> None:
    job = run("take_memory")
    assert job.status is Status.SUCCEEDED, job.error
    assert job.attempt == 1
    assert history(job).count("job.warning") == 1
    assert artifacts(job) == ["report.json"]


def test_memory_that_never_suffices_fails_the_job() -> None:
    job = run("take_all_memory")
    told = error(job)
    assert told["code"] == "device_out_of_memory"
    assert (told["category"], told["retryable"]) == ("hardware", False)
    assert history(job).count("job.warning") == 1


def test_a_process_that_the_kernel_kills_is_tried_again_with_less() -> None:
    assert run("be_killed").status is Status.SUCCEEDED


@pytest.mark.parametrize("deed", ["crash", "leave"])
def test_a_process_that_always_dies_costs_its_attempts_and_then_the_job(
    deed: str,
) -> None:
    job = run(deed)
    assert job.status is Status.QUEUED
    run_job(job.id)
    job = read(job.id)
    assert error(job)["code"] == "worker_lost"
    assert history(job).count("job.attempt_lost") == 2


def test_the_owner_reads_where_a_process_crashed_and_nothing_else_of_it() -> None:
    job = run("mourn")
    run_job(job.id)
    told = error(read(job.id))
    assert told["code"] == "worker_lost"
    excerpt = told["log_excerpt"]
    assert excerpt.startswith('File "in.py", line 7, in read\nValueError: cannot read ')
    assert "Fatal Python error: Segmentation fault" in excerpt
    assert re.search(r'File "rogue\.py", line \d+ in mourn', excerpt)
    for hidden in ("my own text", "/srv", "hunter2", "/work/", str(Path.cwd())):
        assert hidden not in excerpt
    assert len(excerpt) <= EXCERPT_CHARACTERS


def test_a_fork_bomb_is_swept_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECISION_JOB_MEMORY_BYTES", "0")  # many have much, together
    settings.settings.cache_clear()
    assert error(run("fork"))["code"] == "untrusted_process"


def test_a_cancel_ends_the_process_and_what_it_started() -> None:
    job_id = submit("sleep")
    started = time.monotonic()

    def cancel() -> None:
        eventually(lambda: read(job_id).phase == "sweep")
        with db.transaction() as session:
            jobs.cancel(session, read(job_id).tenant_id, job_id)

    thread = Thread(target=cancel)
    thread.start()
    run_job(job_id)
    thread.join()
    assert read(job_id).status is Status.CANCELLED
    assert time.monotonic() - started < 10


def test_large_files_are_published_and_links_are_not(rogue: Path) -> None:
    job = run("fill_folder")
    assert error(job)["code"] == "untrusted_process"
    assert artifacts(job) == []


def test_a_report_that_is_not_what_it_says_is_not_signed() -> None:
    job = run("no_report")
    assert error(job)["code"] == "untrusted_process"
    assert artifacts(job) == []


def test_folders_are_published_file_by_file() -> None:
    job = run("checkpoint")
    assert job.status is Status.SUCCEEDED, job.error
    assert artifacts(job) == ["checkpoint/model.safetensors", "report.json"]
    stored = storage.key(job.id, 1, "checkpoint/model.safetensors")
    assert storage.store().size(stored) == 3 * 2**20


def test_one_model_cannot_forge_results_of_another() -> None:
    assert run("poison").status is Status.SUCCEEDED
    with db.reading() as session:
        (kept,) = session.query(KeptResult).all()
    assert kept.key != "b" * 64
    assert run("poison", model_sha256="1" * 64).status is Status.SUCCEEDED
    with db.reading() as session:
        assert session.query(KeptResult).count() == 2


def test_a_machine_without_walls_runs_nothing_where_they_are_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRECISION_SANDBOX", "require")
    monkeypatch.setenv("PRECISION_SANDBOX_USER", "no-such-user")
    settings.settings.cache_clear()
    job = run("fill_folder")
    if os.geteuid() != 0:
        pytest.skip("whoever is not root has nobody to become")
    told = error(job)
    assert told["code"] == "sandbox_unavailable"
    assert "no-such-user" in told["message"]


def test_what_it_prints_is_passed_on_up_to_a_limit(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run("print_much").status is Status.SUCCEEDED
    assert len(capfd.readouterr().err) <= relay.LOG_BYTES + 10_000


def test_the_next_worker_takes_away_what_a_killed_one_left(rogue: Path) -> None:
    left = rogue / "work" / "0123"
    (left / "out").mkdir(parents=True)
    with workdir.opened() as mine:
        assert not left.exists()
        with workdir.opened() as other:  # what is in use stays
            assert mine.root.exists()
            assert other.root != mine.root


def test_starting_a_process_takes_no_time(rogue: Path) -> None:
    """It is the same torch that is loaded, only elsewhere."""
    run("checkpoint")

    def once() -> float:
        started = time.perf_counter()
        run("checkpoint")
        return time.perf_counter() - started

    assert min(once() for _ in range(3)) < 1.0
