"""Every command of the documents is run as it stands, against one embedded service.

Its data folder has a tiny model under the demo's name. A document is one session of
bash in a folder of its own, which has what a reader is supposed to have: a model, a
file of text, a log of training. What is not run is listed, with the reason, and what
can be known of it is checked.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.documents import DOCUMENTS, ROOT, Command, commands, name_of, split
from tests.service import BODY, Service, service, tiny_model

pytestmark = [pytest.mark.service, pytest.mark.slow]

DEMO = "smollm2-135m-instruct"
Done = subprocess.CompletedProcess[str]
PATIENCE_S = 240.0  # a document takes seconds where nothing else runs
AT_A_TIME = 2  # documents: while one waits for its job, another one goes on


@dataclass(frozen=True, slots=True)
class NotRun:
    """Why commands that begin so are not run, and what is checked instead."""

    reason: str
    check: Callable[[str], bool]


def is_target(command: str) -> bool:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    return shlex.split(command, comments=True)[1] in targets


def has_its_files(command: str) -> bool:
    """Whether every path in it that begins in this repository leads somewhere."""
    words = shlex.split(command, comments=True)
    paths = [w for w in words if w.split("/")[0] in ("deploy", "optimizer", "tests")]
    return bool(paths) and all((ROOT / path).exists() for path in paths)


def is_module(command: str) -> bool:
    found = re.search(r"python -m ([\w.]+)", command)
    return found is not None and find_spec(found[1]) is not None


def is_known_to_celery(command: str) -> bool:
    """Whether Celery has the command, its options, and the task that it names."""
    from celery.bin.celery import celery

    words = shlex.split(command.replace("\\\n", ""), comments=True)
    name = words[3]  # celery -A workers.app NAME
    known = {o for p in celery.commands[name].params for o in p.opts}
    tasks = re.findall(r'name="([\w.]+)"', (ROOT / "workers" / "app.py").read_text())
    task = words[4] if name == "call" else None
    options = {w.partition("=")[0] for w in words[3:] if w.startswith("-")}
    return options <= known and (task is None or task in tasks)


def is_command(command: str) -> bool:
    return True  # tests/test_docs.py looks at every command and option of `precision`


def is_restored_from(command: str) -> bool:
    program = shlex.split(command)[0].removesuffix("3")
    return program in (ROOT / "tests" / "faults" / "test_restore.py").read_text()


NOT_RUN = {
    "make ": NotRun("it makes an environment, or takes minutes", is_target),
    "precision serve": NotRun("the service runs already", is_command),
    "precision optimize smollm2-135m-instruct --hardware h100 --task": NotRun(
        "it trains for minutes; tests/training/test_job.py does it", is_command
    ),
    "precision reproduce": NotRun(
        "it runs a whole job again; tests/api/test_verify_cli.py does so", is_command
    ),
    "precision hardware profile": NotRun("it times kernels for minutes", is_command),
    "docker ": NotRun("it needs Docker, and pulls images", has_its_files),
    "kubectl apply": NotRun("it needs a cluster", has_its_files),
    "kubectl ": NotRun("it needs a cluster", lambda command: True),
    "celery ": NotRun("it needs a broker, and a device", is_known_to_celery),
    "python -m ": NotRun("a process that stays, or minutes long", is_module),
    "pg_dump ": NotRun("tests/faults/test_restore.py runs it", is_restored_from),
    "pg_restore ": NotRun("tests/faults/test_restore.py runs it", is_restored_from),
    "sqlite3 ": NotRun("tests/faults/test_restore.py does so", is_restored_from),
    "vllm serve": NotRun("it needs vLLM", lambda command: True),
}


def excuse(command: Command) -> NotRun | None:
    """Return why a command is not run. None: it is."""
    begins = [why for start, why in NOT_RUN.items() if command.text.startswith(start)]
    return begins[0] if begins else None


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service that the documents talk to; folders of `weights` may be named."""
    folder = tmp_path_factory.mktemp("guide")
    tiny_model(folder / "var" / "models" / DEMO)
    tiny_model(folder / "weights" / "my-model")
    # A model this small is computed faster by one thread than by two.
    says = {"PRECISION_WEBHOOK_ALLOW": "127.0.0.1", "PRECISION_THREADS": "1"}
    root = ("--model-root", str(folder / "weights"))
    with service(folder / "var", *root, environment=says) as started:
        yield started


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, running: Service
) -> Iterator[dict[Path, Future[Done]]]:
    """What comes of the documents that are asked for; those that need a job come last."""
    asked = {item.nodeid for item in request.session.items}
    here = f"{request.node.nodeid}::{test_the_commands_of_a_document_run.__name__}"
    pages = [page for page in DOCUMENTS if f"{here}[{name_of(page)}]" in asked]
    pages.sort(key=begins_with_a_result)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        yield {page: pool.submit(run, page, running) for page in pages}


def reader(folder: Path, data_dir: Path) -> Path:
    """Make a folder with what a reader has."""
    folder.mkdir()
    weights = data_dir.parent / "weights"
    (folder / "var").symlink_to(data_dir)
    (folder / "weights").symlink_to(weights)
    shutil.copytree(weights / "my-model", folder / "my-model")
    # Other text than another document's: what a job reads cannot be deleted.
    lines = [{"text": f"{folder.name}, line {i}, says this once."} for i in range(60)]
    steps = [{"step": i, "loss": 4.0 / (i + 1) + 1.0} for i in range(200)]
    for name, rows in (("prompts.jsonl", lines), ("run.jsonl", steps)):
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / name).write_text(text)
    return folder


def script(page: Path) -> str:
    """Return a document's commands as one script that says which of them failed."""
    lines = ["set -euo pipefail", "trap 'echo \"failed: $AT\" >&2' ERR"]
    lines.append("trap 'kill $(jobs -p) 2>/dev/null || true' EXIT")
    for command in commands(page):
        if excuse(command) is None:
            lines += [f"AT={shlex.quote(command.where)}", command.text]
    return "\n".join(lines)


def placed(text: str, running: Service, folder: Path) -> str:
    """Put this machine's places where the documents name others."""
    places = {
        "http://127.0.0.1:8080": str(running.address["url"]),
        "postgresql+psycopg://precision:…@db.internal/precision": (
            f"sqlite:///{folder}/its.db"
        ),
        "/srv/": f"{folder}/srv/",
    }
    for said, meant in places.items():
        text = text.replace(said, meant)
    return text


def begins_with_a_result(page: Path) -> bool:
    """Whether a document takes for granted that a job has succeeded."""
    return "--status succeeded" in page.read_text("utf-8")


def run(page: Path, running: Service) -> Done:
    """Run the commands of a document. Without a result that it needs, make one first."""
    done = running.client.jobs(status="succeeded", limit=1)
    if begins_with_a_result(page) and not done:
        job = running.client.optimize({**BODY, "model": DEMO})
        running.client.wait(job["id"])
    name = name_of(page).replace("/", "-")
    folder = reader(running.data_dir.parent / name, running.data_dir)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PRECISION_")}
    beside = f"{Path(sys.executable).parent}:{clean['PATH']}"
    return subprocess.run(
        ["bash", "-c", placed(script(page), running, folder)],
        cwd=folder,
        env={**clean, "PATH": beside, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.mark.parametrize("page", DOCUMENTS, ids=name_of)
def test_the_commands_of_a_document_run(
    page: Path, results: dict[Path, Future[Done]]
) -> None:
    done = results[page].result()
    assert done.returncode == 0, f"{done.stderr[-3000:]}\n{done.stdout[-1000:]}"


EXCUSED = [(c, why) for page in DOCUMENTS for c in commands(page) if (why := excuse(c))]


@pytest.mark.parametrize(
    ("command", "why"), EXCUSED, ids=[command.where for command, _ in EXCUSED]
)
def test_what_is_not_run_is_there(command: Command, why: NotRun) -> None:
    assert why.check(command.text), f"{command.text}: not run, since {why.reason}"


def test_nothing_is_excused_in_vain() -> None:
    texts = [command.text for command, _ in EXCUSED]
    idle = [s for s in NOT_RUN if not any(text.startswith(s) for text in texts)]
    assert idle == []


def test_a_command_ends_where_bash_says() -> None:
    block = "# said\none \\\n  two\n\nthree 'a\nb'\ncat <<'END'\nx\nEND\nfour\n"
    assert [text.split()[0] for _, text in split(block)] == [
        "one",
        "three",
        "cat",
        "four",
    ]
    assert [line for line, _ in split(block)] == [1, 4, 6, 9]
