"""A database that is away again and again."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import text

from api import db

CUT = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
)


@contextmanager
def outages() -> Iterator[None]:
    """Cut every connection now and then, or hold SQLite's one lock, while the block runs."""
    over = threading.Event()
    away = _cut if db.engine().dialect.name == "postgresql" else _lock

    def again() -> None:
        while not over.wait(0.3):
            away()

    thread = threading.Thread(target=again)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _cut() -> None:
    with db.engine().connect() as connection:
        connection.execute(CUT)


def _lock() -> None:
    with db.transaction():
        time.sleep(1.0)
