"""How many statements a request costs: one more is a tenth of its time under load."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event
from sqlalchemy.orm import Session

from api import catalog, db, places, resolve
from api.schemas import OptimizeRequest
from optimizer.spec import OptimizeSpec

FLAT = {"model": "tiny", "hardware": "h100"}


@pytest.fixture
def statements(
    tiny: Path, client: TestClient, bells: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[str]]:
    """What the threads of requests ask the database, without BEGIN and COMMIT."""
    monkeypatch.setattr(places, "FRESH_S", 60.0)
    catalog.register_folders()  # as the service does at its start, later
    heard: list[str] = []

    def hear(_connection: object, _cursor: object, text: str, *_: object) -> None:
        if threading.current_thread().name.startswith("AnyIO"):
            heard.append(text.split()[0])

    assert client.post("/v1/optimize", json=FLAT).status_code == 202  # proves the key
    heard.clear()
    event.listen(db.engine(), "before_cursor_execute", hear)
    yield heard
    event.remove(db.engine(), "before_cursor_execute", hear)


def test_a_job_is_made_with_two_looks_and_two_writes(
    client: TestClient, statements: list[str]
) -> None:
    assert client.post("/v1/optimize", json=FLAT).status_code == 202
    # The model; the tenant's standing, the time and who listens; the job; its events.
    assert statements == ["SELECT", "SELECT", "INSERT", "INSERT"]


def test_a_job_is_read_with_one_look(client: TestClient, statements: list[str]) -> None:
    job = client.post("/v1/optimize", json=FLAT).json()
    client.get(job["links"]["self"])  # the place in the queue is worked out once
    statements.clear()
    assert client.get(job["links"]["self"]).status_code == 200
    assert statements == ["SELECT"]


def test_one_thread_makes_jobs_and_a_folder_does_not_hold_it_up(
    tiny: Path, client: TestClient, bells: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, lock, there, most = resolve.to_spec, threading.Lock(), [0], [0]
    entered, leave = threading.Event(), threading.Event()

    def slow(session: Session, tenant: str, body: OptimizeRequest) -> OptimizeSpec:
        if body.model.path is not None:
            entered.set()
            assert leave.wait(60)
            return usual(session, tenant, body)
        with lock:
            there[0] += 1
            most[0] = max(most[0], there[0])
        time.sleep(0.01)
        with lock:
            there[0] -= 1
        return usual(session, tenant, body)

    monkeypatch.setattr(resolve, "to_spec", slow)
    folder = {**FLAT, "model": {"path": str(tiny)}}
    with ThreadPoolExecutor(9) as pool:
        held = pool.submit(client.post, "/v1/optimize", json=folder)
        assert entered.wait(60)
        made = list(
            pool.map(lambda _: client.post("/v1/optimize", json=FLAT), range(8))
        )
        leave.set()
        assert held.result().status_code == 202
    assert {answer.status_code for answer in made} == {202}
    assert most == [1]
