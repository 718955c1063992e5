"""Keys: shown once, stored as a hash, refused with the same words."""

import re
import time
from datetime import timedelta

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event

from api import auth, callers, db
from api.errors import NotFound, Unauthenticated
from api.models import ApiKey, now
from tests.api.conftest import Refused


def verify(header: str | None) -> auth.Caller:
    with db.reading() as session:
        return auth.verify(session, header)


def test_a_key_opens_its_tenant_and_is_stored_as_a_hash(key: str) -> None:
    caller = verify(f"Bearer {key}")
    with db.reading() as session:
        (row,) = session.query(ApiKey)
        assert (
            auth.tenant_named(session, "acme").id == caller.tenant_id == row.tenant_id
        )
        assert [(k.kid, tenant) for k, tenant in auth.keys(session)] == [
            (caller.actor, "acme")
        ]
    assert key.startswith(f"po_live_{row.kid}_")
    assert len(key) == len("po_live_") + 8 + 1 + 32 + 1 + 6
    stored = str({c.name: getattr(row, c.name) for c in row.__table__.columns})
    assert key.split("_")[3] not in stored


def test_two_keys_of_one_tenant_both_work(key: str) -> None:
    with db.transaction() as session:
        second = auth.create_key(session, "acme", "rotation")
    first = verify(f"bearer {key}")
    assert verify(f"Bearer  {second}").tenant_id == first.tenant_id


def strangers(key: str) -> list[str | None]:
    """What is not a key of ours, in many ways."""
    other = auth._sealed(f"po_live_{'k' * 8}_{'s' * 32}")
    near = auth._sealed(key[:-8] + ("A" if key[-8] != "A" else "B"))
    basic = f"Basic {key}"
    wide = "Bearer po_live_" + "é" * 48
    typo = f"Bearer {key[:-1]}{'a' if key[-1] != 'a' else 'b'}"
    huge = "Bearer " + "x" * 20_000
    found = [f"Bearer {other}", f"Bearer {near}", basic, typo, huge, wide]
    return [None, "", "Bearer", key, f"Bearer {key} ", *found]


def test_everything_else_is_refused_in_the_same_words(
    client: TestClient, key: str, refused: Refused
) -> None:
    assert client.get("/v1/jobs").status_code == 200
    kid = verify(f"Bearer {key}").actor
    del client.headers["Authorization"]
    seen = set()
    for header in strangers(key):
        raw = {} if header is None else {b"authorization": header.encode()}
        if header == f"Bearer {key} ":
            continue  # a server strips it
        answer = client.get("/v1/jobs", headers=raw)  # type: ignore[arg-type]
        seen.add(refused(answer, 401, "unauthenticated")["detail"])
        assert answer.headers["www-authenticate"] == "Bearer"
    with db.transaction() as session:
        auth.revoke(session, kid)
    answer = client.get("/v1/jobs", headers={"Authorization": f"Bearer {key}"})
    seen.add(refused(answer, 401, "unauthenticated")["detail"])
    assert len(seen) == 1
    assert key not in answer.text


def test_junk_is_refused_without_reading_the_database(key: str) -> None:
    queries: list[str] = []
    event.listen(db.engine(), "before_cursor_execute", lambda *a: queries.append(a[2]))
    for junk in ("Bearer po_live_x", f"Bearer {key[:-1]}~", f"Bearer {key[:-2]}__"):
        with pytest.raises(Unauthenticated):
            verify(junk)
    flipped = key[:20] + ("a" if key[20] != "a" else "b") + key[21:]
    with pytest.raises(Unauthenticated):
        verify(f"Bearer {flipped}")
    assert queries == []


def test_use_is_noted_once_a_minute(client: TestClient, key: str) -> None:
    client.get("/v1/jobs")
    with db.reading() as session:
        assert not auth.prove(session, key).stale
    with db.transaction() as session:
        row = session.get(ApiKey, auth.key_id(key))
        assert row is not None
        assert row.last_used_at is not None
        row.last_used_at = now() - timedelta(minutes=2)
    with db.reading() as session:
        assert auth.prove(session, key).stale


def test_a_key_that_was_proven_moments_ago_needs_no_database(
    client: TestClient, key: str
) -> None:
    client.get("/v1/formats/bf16")
    queries: list[str] = []
    event.listen(db.engine(), "before_cursor_execute", lambda *a: queries.append(a[2]))
    assert client.get("/v1/formats/bf16").status_code == 200
    assert queries == []


def test_a_key_revoked_elsewhere_stops_within_seconds(
    client: TestClient, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "KEPT_S", 0.2)
    client.get("/v1/jobs")
    with db.transaction() as session:  # as another process does
        row = session.get(ApiKey, auth.key_id(key))
        assert row is not None
        row.revoked_at = now()
    time.sleep(0.25)
    assert client.get("/v1/jobs").status_code == 401


def test_a_key_expires_to_the_moment_though_it_is_remembered(
    client: TestClient,
) -> None:
    with db.transaction() as session:
        soon = now() + timedelta(seconds=0.3)
        short = auth.create_key(session, "acme", "short", expires_at=soon)
    headers = {"Authorization": f"Bearer {short}"}
    assert client.get("/v1/jobs", headers=headers).status_code == 200
    time.sleep(0.3)
    assert client.get("/v1/jobs", headers=headers).status_code == 401


def test_what_is_remembered_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "MAX_KEPT", 3)
    kept = callers.Verified()
    caller = auth.Caller("ten", "kid", "personal", frozenset())
    for number in range(5):
        kept.put(str(number), callers.Proof(caller, None, stale=False))
    assert [kept.get(str(n)) is not None for n in range(5)] == [False] * 2 + [True] * 3
    kept.clear()
    assert kept.get("4") is None


def test_revoking_an_unknown_key_says_so(key: str) -> None:
    with db.transaction() as session, pytest.raises(NotFound):
        auth.revoke(session, "nokey000")


def test_every_endpoint_under_v1_wants_a_key(
    client: TestClient, refused: Refused
) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    del client.headers["Authorization"]
    asked = 0
    for path, operations in paths.items():
        for method in operations:
            if path.startswith("/v1/"):
                url = re.sub(r"\{\w+\}", "1", path)
                refused(client.request(method, url), 401, "unauthenticated")
                asked += 1
    assert asked >= 16
