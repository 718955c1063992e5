"""Settings under which a lost worker is noticed soon, and a service that tests share."""

import multiprocessing
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from sqlalchemy import URL, create_engine, text, update

from api import auth, db, jobs, queue, settings, storage
from api.models import Job
from optimizer.spec import OptimizeSpec
from tests.service import Service, service, tiny_model

ROOT = Path(__file__).parents[2]
LIGHT = {  # see `light/sitecustomize.py`
    "PYTHONPATH": os.pathsep.join(
        [
            str(Path(__file__).parent / "light"),
            str(ROOT),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
    ),
}
LEASE = {"PRECISION_LEASE_S": "6"}  # twice what a busy machine takes for a beat


@pytest.fixture
def patient(database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Leases end when a test says so; a machine that is busy ends none."""
    for name, value in {
        "PRECISION_LEASE_S": "60",
        "PRECISION_BEAT_S": "0.2",
        "PRECISION_SANDBOX": "off",
        "PRECISION_MAX_RUNNING": "100",
        "PRECISION_MAX_QUEUED": "100",
    }.items():
        monkeypatch.setenv(name, value)
    settings.settings.cache_clear()
    yield database
    for left in multiprocessing.active_children():
        left.kill()  # a test that failed may have stopped one: it would never end
        left.join()


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Service, dict[str, str]]]:
    """Start a service with two workers, and return it with its settings."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny_model(folder / "models" / "tiny")
    own = {"PRECISION_DATA_DIR": str(folder)}
    own["PRECISION_HEARTBEAT_FILE"] = str(folder / "beats")
    if request.param == "postgres":
        own["PRECISION_DATABASE_URL"] = _made(
            request.getfixturevalue("postgres_url"),
            request.getfixturevalue("postgres_template"),
        )
    with service(folder, "--workers", "2", environment=LIGHT | LEASE | own) as started:
        yield started, own


def _made(url: URL, template: str) -> str:
    """Make a migrated database; it goes with its server."""
    name = f"faults_{uuid4().hex}"
    admin = create_engine(url.set(database="template1"), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template}"))
    admin.dispose()
    return url.set(database=name).render_as_string(hide_password=False)


@pytest.fixture
def running(
    shared: tuple[Service, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Service]:
    """The shared service, whose rows and files this process reads, too."""
    started, own = shared
    for name in [n for n in os.environ if n.startswith("PRECISION_")]:
        monkeypatch.delenv(name)
    for name, value in {**own, "PRECISION_BROKER_URL": broker_url(started)}.items():
        monkeypatch.setenv(name, value)
    _forget()
    yield started
    _forget()


def programs(started: Service, word: str) -> list[int]:
    """Return what the supervisor runs now whose command line has the word."""
    children = psutil.Process(started.process.pid).children()
    return [p.pid for p in children if word in " ".join(_command(p))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def broker_url(started: Service) -> str:
    """Return where the bells of a service ring: its workers know."""
    pid = programs(started, "celery")[0]
    known = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    (found,) = [v for v in known if v.startswith(b"PRECISION_BROKER_URL=")]
    return found.partition(b"=")[2].decode()


def _forget() -> None:
    db.close()
    for cached in (settings.settings, queue.producer, storage.store):
        cached.cache_clear()


def submit(tenth_s: int = 0, **columns: object) -> str:
    """Queue a job that takes so many tenths of a second, and reads nobody's results."""
    model = secrets.token_hex(32)
    spec = OptimizeSpec("tiny", "/models/tiny", model, "h100", seed=tenth_s)
    with db.transaction() as session:
        job = jobs.submit(session, auth.tenant_named(session, "acme").id, spec)
        if columns:
            change = update(Job).where(Job.id == job.id).values(**columns)
            session.execute(change)
        return job.id
