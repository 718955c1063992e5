"""One key, one effect: on both databases, from many threads, and not for ever."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from threading import Barrier

import httpx
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text, update

from api import auth, db, idempotency, queue, retention, settings
from api.app import create_app
from api.callers import Caller
from api.errors import InvalidParameter
from api.models import IdempotencyKey
from tests.api.conftest import BODY, Refused, jobs_in_database, write_model

KEY = {"Idempotency-Key": '"6f1c-aa"'}


@contextmanager
def served(data_dir: Path, patch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    write_model(data_dir / "models" / "tiny")
    patch.setattr(queue, "ring", lambda *_: None)
    with db.transaction() as session:
        key = auth.create_key(session, "acme", "test")
    headers = {"Authorization": f"Bearer {key}"}
    with TestClient(create_app(), headers=headers) as client:
        yield client


def test_the_same_request_is_answered_alike(
    tiny: Path, client: TestClient, bells: list[str]
) -> None:
    first = client.post("/v1/optimize", json=BODY, headers=KEY)
    assert first.headers["idempotency-replayed"] == "false"
    bare = {"Idempotency-Key": "6f1c-aa"}
    again = client.post("/v1/optimize", json=dict(reversed(BODY.items())), headers=bare)
    assert again.headers["idempotency-replayed"] == "true"
    assert (again.status_code, again.content) == (202, first.content)
    for name in ("location", "retry-after", "idempotency-expires"):
        assert again.headers[name] == first.headers[name]
    expires_at = parsedate_to_datetime(first.headers["idempotency-expires"])
    left_s = (expires_at - datetime.now(UTC)).total_seconds()
    assert left_s == pytest.approx(settings.settings().idempotency_s, abs=60)
    assert jobs_in_database() == len(bells) == 1
    other = client.post("/v1/optimize", json=BODY)  # without a key: another job
    assert "idempotency-replayed" not in other.headers
    assert jobs_in_database() == 2


def test_another_body_is_refused(
    tiny: Path, client: TestClient, refused: Refused
) -> None:
    client.post("/v1/optimize", json=BODY, headers=KEY)
    answer = client.post("/v1/optimize", json={**BODY, "task": "chat"}, headers=KEY)
    refused(answer, 422, "idempotency_key_reused")
    assert jobs_in_database() == 1


def test_what_was_refused_is_not_kept(
    tiny: Path, client: TestClient, refused: Refused
) -> None:
    bad = {**BODY, "model": "none"}
    answer = client.post("/v1/optimize", json=bad, headers=KEY)
    refused(answer, 422, "unknown_model")
    answer = client.post(
        "/v1/optimize", json=BODY, headers={**KEY, "Authorization": "Bearer x"}
    )
    refused(answer, 401, "unauthenticated")
    good = client.post("/v1/optimize", json=BODY, headers=KEY)
    assert (good.status_code, jobs_in_database()) == (202, 1)


def test_keys_of_tenants_and_of_paths_do_not_meet(
    tiny: Path, client: TestClient
) -> None:
    first = client.post("/v1/optimize", json=BODY, headers=KEY).json()["id"]
    with db.transaction() as session:
        other = auth.create_key(session, "other", "test")
    theirs = client.post(
        "/v1/optimize", json=BODY, headers={**KEY, "Authorization": f"Bearer {other}"}
    )
    assert theirs.headers["idempotency-replayed"] == "false"
    made = [client.post("/v1/optimize", json=BODY).json()["id"] for _ in range(2)]
    retried = []
    for job_id in made:
        client.post(f"/v1/jobs/{job_id}/cancel")
        answer = client.post(f"/v1/jobs/{job_id}/retry", headers=KEY)
        assert answer.headers["idempotency-replayed"] == "false"
        retried.append(answer.json()["id"])
        again = client.post(f"/v1/jobs/{job_id}/retry", headers=KEY)
        assert again.json()["id"] == retried[-1]
    assert len({first, theirs.json()["id"], *made, *retried}) == 6


def test_a_key_that_has_expired_is_new(tiny: Path, client: TestClient) -> None:
    first = client.post("/v1/optimize", json=BODY, headers=KEY).json()["id"]
    long_ago = text("'2001-01-01 00:00:00.000000'")
    with db.transaction() as session:
        session.execute(update(IdempotencyKey).values(expires_at=long_ago))
    second = client.post("/v1/optimize", json={**BODY, "task": "chat"}, headers=KEY)
    assert second.json()["id"] != first
    with db.transaction() as session:
        assert retention.purge_promises(session) == 0
        session.execute(update(IdempotencyKey).values(expires_at=long_ago))
        assert retention.purge_promises(session) == 1


def test_a_service_must_send_a_key(
    tiny: Path, client: TestClient, refused: Refused
) -> None:
    with db.transaction() as session:
        key = auth.create_key(session, "acme", "ci", kind="service")
    headers = {"Authorization": f"Bearer {key}"}
    answer = client.post("/v1/optimize", json=BODY, headers=headers)
    refused(answer, 400, "idempotency_key_missing")
    answer = client.post("/v1/optimize", json=BODY, headers={**headers, **KEY})
    assert answer.status_code == 202
    assert client.get("/v1/jobs", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ('"a b"', "a b"),
        (r'"a\"b\\c"', 'a"b\\c'),
        ('"a"; x=1', "a"),
        ("a-b_C.9:/", "a-b_C.9:/"),
        (" x ", "x"),
    ],
)
def test_keys_come_in_quotes_or_bare(header: str, key: str) -> None:
    assert idempotency.parse(header) == key


@pytest.mark.parametrize(
    "header", ["", '""', '"', '"a', "a b", "é", '"é"', "x" * 256, '"\\x"', "a\tb"]
)
def test_what_is_no_key_is_refused(header: str) -> None:
    with pytest.raises(InvalidParameter, match="printable"):
        idempotency.parse(header)


def test_a_strange_key_is_named(
    tiny: Path, client: TestClient, refused: Refused
) -> None:
    headers = {"Idempotency-Key": "x" * 256}
    answer = client.post("/v1/optimize", json=BODY, headers=headers)
    problem = refused(answer, 422, "validation_error")
    assert problem["errors"][0]["parameter"] == "Idempotency-Key"
    assert jobs_in_database() == 0


def at_once(number: int, act: Callable[[], httpx.Response]) -> list[httpx.Response]:
    barrier = Barrier(number)

    def go(_: int) -> httpx.Response:
        barrier.wait()
        return act()

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(go, range(number)))


def test_twenty_threads_with_one_key_make_one_job(
    database: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(data_dir, monkeypatch) as client:
        answers = at_once(
            20, lambda: client.post("/v1/optimize", json=BODY, headers=KEY)
        )
    made = [a for a in answers if a.status_code == 202]
    waiting = [a for a in answers if a.status_code == 409]
    assert len(made) + len(waiting) == 20
    assert len({a.json()["id"] for a in made}) == 1
    fresh = [a for a in made if a.headers["idempotency-replayed"] == "false"]
    assert len(fresh) == 1
    for answer in waiting:
        assert answer.json()["code"] == "idempotency_in_progress"
        assert answer.headers["retry-after"].isdigit()
    assert jobs_in_database() == 1


@pytest.mark.service
def test_a_key_that_is_in_use_is_told(
    postgres: object,
    data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: Refused,
) -> None:
    with served(data_dir, monkeypatch) as client:
        with db.transaction() as session:
            tenant = str(session.scalar(text("SELECT id FROM tenants")))
            caller = Caller(tenant, "key", "personal", frozenset())
            once = idempotency.Once(caller, "POST /v1/optimize", "6f1c-aa")
            once._lock(session)  # as a request that is being served holds it
            answer = client.post("/v1/optimize", json=BODY, headers=KEY)
        refused(answer, 409, "idempotency_in_progress")
        assert answer.headers["retry-after"] == "1"
        answer = client.post("/v1/optimize", json=BODY, headers=KEY)
        assert answer.status_code == 202
