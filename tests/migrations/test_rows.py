"""Migrations over rows that are there, beside code that is older, and behind a lock."""

import hashlib
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from alembic import command
from sqlalchemy import MetaData, Table, insert, select, text, update
from sqlalchemy.exc import DBAPIError

from api import db, jobs, queue, scopes, settings, sweeps
from api.models import ApiKey, Artifact, Job, JobEvent, RegisteredModel, Status, Tenant
from optimizer.spec import OptimizeSpec

AT = datetime(2026, 1, 2, 3, 4, 5, 678000)  # as it is stored: UTC, naive
SECRET = "a secret of before"


class Old:
    """What the code of revision 0002 reads and writes: the columns it knows."""

    def __init__(self) -> None:
        self._tables = MetaData()
        self._tables.reflect(db.engine())

    def table(self, name: str) -> Table:
        return self._tables.tables[name]

    def add(self, table: str, **values: Any) -> None:
        with db.engine().begin() as connection:
            connection.execute(insert(self.table(table)).values(values))

    def submit(self, job_id: str, hardware: str, **changes: Any) -> None:
        spec = OptimizeSpec("tiny", "/models/tiny", "0" * 64, hardware).to_json()
        times = dict.fromkeys(("rung_at", "created_at", "queued_at"), AT)
        late = datetime.now(UTC).replace(tzinfo=None) + timedelta(days=1)
        plain = {"status": "queued", "body": {}, "percent": 0.0, "last_seq": 1}
        plain |= {"attempt": 0, "attempts_lost": 0, "expires_at": late}
        values = {**plain, **times, "tenant_id": "ten_1", "spec": spec, **changes}
        self.add("jobs", id=job_id, **values)
        event = {"job_id": job_id, "seq": 1, "tenant_id": "ten_1", "at": AT}
        self.add("job_events", type="job.created", details={}, **event)


@pytest.fixture
def old(database: str) -> Old:
    """A database at 0002, with a row of everything there is."""
    command.downgrade(db.alembic_config(), "0002")
    old = Old()
    old.add("tenants", id="ten_1", name="acme", created_at=AT)
    sha256 = hashlib.sha256(SECRET.encode()).hexdigest()
    mine = {"tenant_id": "ten_1", "created_at": AT}
    old.add("api_keys", kid="abcdefgh", sha256=sha256, name="ci", **mine)
    measured = {"parameters": 7, "stored_bytes": 14, "dtypes": {"BF16": 7}}
    found = {"path": "/m", "stamp": "s", "sha256": "0" * 64, "architecture": "Llama"}
    old.add("models", id="mdl_1", name="tiny", **found, **measured, **mine)
    old.submit("job_1", "h100")
    ended = {"finished_at": AT, "started_at": AT, "outcome": "sla_met", "summary": {}}
    old.submit("job_2", "l4", status="succeeded", **ended)
    file = {"media_type": "application/json", "bytes": 2, "sha256": "0" * 64}
    old.add("artifacts", job_id="job_2", name="report.json", attempt=1, **file, **mine)
    return old


def test_rows_of_before_get_what_they_lack(old: Old) -> None:
    db.migrate()
    with db.reading() as session:
        devices = {job.id: job.hardware for job in session.scalars(select(Job))}
        (key,) = session.scalars(select(ApiKey))
        (file,) = session.scalars(select(Artifact))
        (model,) = session.scalars(select(RegisteredModel))
        (tenant,) = session.scalars(select(Tenant))
    assert devices == {"job_1": "h100", "job_2": "l4"}
    assert (key.kind, key.scopes, key.version) == ("personal", None, 1)
    assert "admin" not in scopes.expand(key.scopes)
    assert (file.kind, file.expires_at, file.purged_at) == ("file", None, None)
    assert (model.uploaded, model.details) == (False, None)
    assert (tenant.max_queued, tenant.max_running) == (None, None)


def test_a_job_of_before_is_run_by_the_code_of_after(old: Old) -> None:
    db.migrate()
    with db.transaction() as session:
        claim = jobs.claim_next(session, "worker", queue.names())
    assert claim is not None
    assert (claim.job_id, claim.spec.hardware) == ("job_1", "h100")
    with db.transaction() as session:
        assert jobs.succeed(session, claim, "sla_met", {})


def test_the_code_of_before_goes_on_after_the_migration(
    old: Old, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes what it knows; a worker of one device finds its job, too."""
    db.migrate()
    old.submit("job_3", "h100")
    table = old.table("jobs")
    claimed = (
        update(table)
        .where(table.c.id == "job_1", table.c.status == "queued")
        .values(status="running", attempt=1, worker="w", started_at=AT)
        .returning(table.c.spec)
    )
    with db.engine().begin() as connection:
        assert connection.execute(claimed).scalar_one()["hardware"] == "h100"
        assert len(connection.execute(select(table)).all()) == 3
    monkeypatch.setenv("PRECISION_HARDWARE_QUEUES", "h100")
    settings.settings.cache_clear()
    with db.transaction() as session:
        sweeps.sweep(session)
        claim = jobs.claim_next(session, "worker", ["hw.h100"])
    assert claim is not None
    assert claim.job_id == "job_3"


def test_a_migration_that_is_taken_back_keeps_the_rows(old: Old) -> None:
    db.migrate()
    command.downgrade(db.alembic_config(), "0002")
    with db.engine().connect() as connection:
        for name in ("tenants", "api_keys", "models", "artifacts", "job_events"):
            assert connection.execute(select(old.table(name))).first(), name
        assert len(connection.execute(select(old.table("jobs"))).all()) == 2
    db.migrate()
    with db.reading() as session:
        told = session.scalars(select(JobEvent).where(JobEvent.job_id == "job_1"))
        assert [event.seq for event in told] == [1]
        assert session.get_one(Job, "job_2").status is Status.SUCCEEDED


@pytest.mark.service
@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_a_migration_does_not_wait_long_for_a_lock(old: Old) -> None:
    """Whoever reads a table for long would stop all who come after the migration."""
    with db.engine().connect() as reader:
        reader.execute(text("SELECT count(*) FROM jobs"))  # and it does not commit
        began = time.monotonic()
        with pytest.raises(DBAPIError, match="lock timeout"):
            db.migrate()
        assert time.monotonic() - began < 10
    assert revision() == "0002"
    db.migrate()  # nothing was changed, so that trying again works
    assert revision() == db.head()


@pytest.mark.service
@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_a_migration_that_takes_long_is_given_up(old: Old) -> None:
    slow = """
        CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_sleep(20); RETURN NEW; END $$;
        CREATE TRIGGER slow BEFORE UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION slow()
    """
    with db.engine().begin() as connection:
        connection.execute(text(slow))
    with pytest.raises(DBAPIError, match="statement timeout"):
        db.migrate()
    assert revision() == "0002"


def revision() -> str | None:
    with db.reading() as session:
        return db.revision(session)
