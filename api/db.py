"""One engine per process, one session per unit of work, and the migrations.

SQLite and PostgreSQL behave alike: foreign keys hold, waits end, and a transaction
that will write takes SQLite's one write lock at its start, so that it never fails
half way because somebody else wrote in between.
"""

import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, sessionmaker

from api.base import Base
from api.settings import settings

if TYPE_CHECKING:
    from alembic.config import Config

BUSY_TIMEOUT_MS = 30_000  # many small writers take turns; each holds the lock for ms
PG_OPTIONS = "-c timezone=utc -c lock_timeout=10s -c statement_timeout=30s"
# A connection beyond the pool would be closed after each use. Requests run in 40 threads.
POOL: dict[str, Any] = {"pool_size": 20, "max_overflow": 20}
BEGIN = "sqlite_begin"  # the execution option that picks SQLite's kind of BEGIN

# SQLite's writers sleep while another writes; those of one process take turns instead.
_turn = threading.RLock()

_to_json = json.JSONEncoder(allow_nan=False).encode  # NaN is no JSON, whoever wrote it


@cache
def engine() -> Engine:
    """Return the engine of this process."""
    url = settings().database_url
    if url.startswith("sqlite"):
        settings().data_dir.mkdir(parents=True, exist_ok=True)
        patience = {"timeout": BUSY_TIMEOUT_MS / 1000}
        made = create_engine(
            url, json_serializer=_to_json, connect_args=patience, **POOL
        )
        event.listen(made, "connect", _on_sqlite_connect)
        event.listen(made, "begin", _on_sqlite_begin)
        return made
    connect_args = {"options": PG_OPTIONS, "connect_timeout": 5}
    return create_engine(
        url,
        pool_pre_ping=True,
        json_serializer=_to_json,
        connect_args=connect_args,
        **POOL,
    )


def _on_sqlite_connect(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # BEGIN is ours, so that DDL is covered too
    connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA foreign_keys=ON")


def _on_sqlite_begin(connection: Connection) -> None:
    begin = connection.get_execution_options().get(BEGIN, "BEGIN")
    if not begin:
        return
    try:
        connection.connection.cursor().execute(begin)
    except sqlite3.OperationalError as error:  # another held the lock for too long
        raise OperationalError(begin, None, error) from error


@cache
def _readers() -> sessionmaker[Session]:
    return sessionmaker(engine(), expire_on_commit=False)


@cache
def _glancers() -> sessionmaker[Session]:
    bare = engine().execution_options(**{BEGIN: ""})
    return sessionmaker(bare, expire_on_commit=False)


@cache
def _writers() -> sessionmaker[Session]:
    writing = engine().execution_options(**{BEGIN: "BEGIN IMMEDIATE"})
    return sessionmaker(writing, expire_on_commit=False)


@contextmanager
def transaction() -> Iterator[Session]:
    """Commit on the way out, roll back on an error. Nobody else commits."""
    with _turn if _sqlite() else nullcontext(), _writers().begin() as session:
        yield session


@contextmanager
def reading() -> Iterator[Session]:
    """Give one consistent view. Nothing may be written."""
    with _readers()() as session:
        yield session


@contextmanager
def glancing() -> Iterator[Session]:
    """Read what is one row, or need not agree: on SQLite each query sees its own moment.

    A BEGIN costs as much as a query, for each of the many requests that ask one.
    """
    with _glancers()() as session:
        yield session


@contextmanager
def writing(session: Session) -> Iterator[None]:
    """Go on with a transaction in a session that has only glanced, as `transaction`.

    Another session, with its connection, would cost a request as much as a query.
    """
    with _turn if _sqlite() else nullcontext():
        try:
            if _sqlite():  # elsewhere the first look began one, which has no snapshot
                session.connection().connection.cursor().execute("BEGIN IMMEDIATE")
            yield
            session.commit()
        except BaseException:
            session.rollback()
            raise


def _sqlite() -> bool:
    return engine().dialect.name == "sqlite"


def insert_into(session: Session, name: str) -> Any:
    """Return an INSERT that may say ON CONFLICT, which both databases spell alike."""
    table = Base.metadata.tables[name]
    if session.get_bind().dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)


def get_session() -> Iterator[Session]:
    """FastAPI dependency: a session to read with."""
    with reading() as session:
        yield session


def close() -> None:
    """Close every connection and forget the engine: the next use opens it anew."""
    if engine.cache_info().currsize:
        engine().dispose()
    for cached in (engine, _readers, _glancers, _writers):
        cached.cache_clear()


def alembic_config() -> "Config":
    """Return Alembic's configuration of the installed `migrations` package."""
    from alembic.config import Config  # slow to import, and rarely needed

    config = Config()
    location = str(files("migrations")).replace("%", "%%")
    config.set_main_option("script_location", location)
    return config


def migrate(revision: str = "head") -> None:
    """Bring the database up to `revision`. Safe to call from many processes at once."""
    from alembic import command

    command.upgrade(alembic_config(), revision)


@cache
def head() -> str:
    """Return the newest revision that this code knows."""
    from alembic.script import ScriptDirectory

    return str(ScriptDirectory.from_config(alembic_config()).get_current_head())


def revision(session: Session) -> str | None:
    """Return the revision that the database is at. None: nothing has been migrated."""
    found = session.scalar(text("SELECT version_num FROM alembic_version"))
    return None if found is None else str(found)
