"""Migrations and models agree, on SQLite and on PostgreSQL."""

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text
from sqlalchemy.exc import StatementError

from api import db
from api.models import Base, Tenant


def test_models_and_migrations_agree(database: str) -> None:
    with db.engine().connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_up_down_up(database: str) -> None:
    with db.reading() as session:
        assert db.revision(session) == db.head()
    command.downgrade(db.alembic_config(), "base")
    assert inspect(db.engine()).get_table_names() == ["alembic_version"]
    db.migrate()
    assert set(inspect(db.engine()).get_table_names()) > set(Base.metadata.tables)


def test_a_second_migration_has_nothing_to_do(database: str) -> None:
    db.migrate()
    with db.reading() as session:
        assert db.revision(session) == db.head()


def test_times_come_back_with_their_zone(database: str) -> None:
    east = datetime(2026, 3, 1, 2, 30, tzinfo=timezone(timedelta(hours=5)))
    with db.transaction() as session:
        session.add(Tenant(id="ten_1", name="acme", created_at=east))
    with db.reading() as session:
        read = session.get_one(Tenant, "ten_1").created_at
    assert (read, read.tzinfo) == (east, UTC)


def test_a_time_without_a_zone_is_refused(database: str) -> None:
    naive = datetime(2026, 3, 1, 2, 30)
    with (
        pytest.raises(StatementError, match="naive datetime"),
        db.transaction() as session,
    ):
        session.add(Tenant(id="ten_1", name="acme", created_at=naive))


def test_sqlite_is_set_up_for_many_processes(sqlite: Path) -> None:
    with db.reading() as session:
        assert session.scalar(text("PRAGMA journal_mode")) == "wal"
        assert session.scalar(text("PRAGMA foreign_keys")) == 1
        assert session.scalar(text("PRAGMA busy_timeout")) == db.BUSY_TIMEOUT_MS


def test_a_failed_migration_leaves_nothing_behind(data_dir: Path) -> None:
    with db.transaction() as session:
        session.execute(text("CREATE TABLE job_events (x INTEGER)"))  # in the way
    with pytest.raises(Exception, match="job_events"):
        db.migrate()
    assert inspect(db.engine()).get_table_names() == ["job_events"]
