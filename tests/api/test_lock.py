"""Another process holds SQLite's one write lock for longer than anybody waits."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from sqlalchemy.exc import OperationalError

from api import db
from tests.api.conftest import BODY, Refused


@pytest.fixture
def held(
    data_dir: Path, tiny: Path, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The lock, held by somebody else; connections made from now on wait a moment."""
    path = next(path for _, name, path in _databases() if name == "main")
    monkeypatch.setattr(db, "BUSY_TIMEOUT_MS", 50)
    db.close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    yield
    other.close()
    db.close()


def _databases() -> list[tuple[int, str, str]]:
    with db.reading() as session:
        raw = session.connection().connection
        return list(raw.cursor().execute("PRAGMA database_list"))


def test_who_writes_is_told_to_come_again(
    held: None, client: TestClient, refused: Refused
) -> None:
    answer = client.post("/v1/optimize", json=BODY)
    refused(answer, 503, "overloaded")
    assert int(answer.headers["Retry-After"]) > 0


def test_a_worker_sees_it_as_any_database_that_is_away(held: None) -> None:
    with (
        pytest.raises(OperationalError, match="locked"),
        db.transaction() as session,
    ):
        session.connection()
