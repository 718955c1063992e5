"""Alembic's entry: one transaction, short waits, so that a deploy never blocks the API."""

from alembic import context
from sqlalchemy import text

from api import db
from api.models import Base

LOCK_TIMEOUT_MS = 4_000  # longer than any query of ours, shorter than a client waits
STATEMENT_TIMEOUT_MS = 5_000
ADVISORY_LOCK = 0x707265  # any number, as long as it is always the same


def run() -> None:
    engine = db.engine().execution_options(**{db.BEGIN: "BEGIN IMMEDIATE"})
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}"))
            connection.execute(
                text(f"SET LOCAL statement_timeout = {STATEMENT_TIMEOUT_MS}")
            )
            # Two processes may start at once: the second waits, then has nothing to do.
            connection.execute(text(f"SELECT pg_advisory_xact_lock({ADVISORY_LOCK})"))
        context.configure(
            connection=connection,
            target_metadata=Base.metadata,
            transactional_ddl=True,
            compare_type=True,
        )
        context.run_migrations()


run()
