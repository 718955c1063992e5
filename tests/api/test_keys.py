"""API keys over HTTP: made, narrowed, rotated and revoked by a tenant's admin."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api import audit, auth, db, versions
from api.app import create_app
from api.models import ApiKey, now
from tests.api.conftest import Json, Refused

KEYS = "/v1/api_keys"
READER: Json = {"name": "reader", "scopes": ["jobs:read"]}


@pytest.fixture
def admin(database: str, bells: list[str]) -> Iterator[TestClient]:
    """The API, asked with acme's only admin key, on SQLite and on PostgreSQL."""
    with db.transaction() as session:
        key = auth.create_key(session, "acme", "admin", ["admin"])
    with TestClient(create_app(), headers=bearer(key)) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def own_id(client: TestClient) -> str:
    return auth.key_id(client.headers["authorization"].removeprefix("Bearer "))


def made(client: TestClient, **changes: Any) -> Json:
    answer = client.post(KEYS, json=READER | changes)
    assert answer.status_code == 201, answer.text
    found: Json = answer.json()
    return found


def works(client: TestClient, key: str) -> int:
    return client.get("/v1/jobs", headers=bearer(key)).status_code


def test_a_key_is_for_a_version_of_the_api(
    admin: TestClient, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = "2027-03-01"
    new = made(admin)
    assert new["api_version"] == versions.CURRENT
    unknown = admin.post(KEYS, json=READER | {"api_version": later})
    refused(unknown, 422, "validation_error")

    # What will be, once there is a second version: both are served, then the first.
    monkeypatch.setattr(versions, "SERVED", (versions.CURRENT, later))
    with db.transaction() as session:
        auth.by_id(session, new["id"]).api_version = later
    asked = {**bearer(new["key"]), "API-Version": versions.CURRENT}
    answers = [admin.get("/v1/jobs", headers=h) for h in (bearer(new["key"]), asked)]
    assert [a.headers["api-version"] for a in answers] == [later, versions.CURRENT]
    monkeypatch.setattr(versions, "SERVED", (versions.CURRENT,))
    gone = admin.get("/v1/jobs", headers=bearer(new["key"]))
    refused(gone, 400, "unknown_version")


def test_a_key_is_made_shown_once_and_works(admin: TestClient) -> None:
    answer = admin.post(KEYS, json=READER | {"expires_in": 3600, "kind": "service"})
    new = answer.json()
    assert answer.status_code == 201
    assert answer.headers["location"] == f"{KEYS}/{new['id']}"
    assert new["key"].startswith(f"po_live_{new['id']}_")
    assert new["kind"] == "service"
    assert new["status"] == "active"
    ends = datetime.fromisoformat(new["expires_at"])
    assert timedelta(minutes=59) < ends - datetime.now(UTC) < timedelta(minutes=61)
    assert works(admin, new["key"]) == 200
    shown = admin.get(f"{KEYS}/{new['id']}")
    assert "key" not in shown.json()
    assert new["key"] not in admin.get(KEYS).text + shown.text
    assert shown.headers["etag"] == answer.headers["etag"]


def test_keys_are_listed_by_page_and_say_when_they_were_used(admin: TestClient) -> None:
    ids = {made(admin, name=f"key {n}")["id"] for n in range(5)} | {own_id(admin)}
    first = admin.get(KEYS, params={"limit": 4}).json()
    rest = admin.get(KEYS, params={"limit": 4, "after": first["next_cursor"]}).json()
    listed = [key["id"] for key in first["data"] + rest["data"]]
    assert first["has_more"]
    assert not rest["has_more"]
    assert sorted(listed) == sorted(ids)
    (own,) = [k for k in first["data"] + rest["data"] if k["id"] == own_id(admin)]
    assert own["last_used_at"] is not None


def test_an_edit_names_the_version_that_it_edits(
    admin: TestClient, refused: Refused
) -> None:
    new = made(admin)
    url = f"{KEYS}/{new['id']}"
    change = {"scopes": ["jobs:*", "jobs:*"], "name": "worker"}
    refused(admin.patch(url, json=change), 428, "precondition_required")
    seen = admin.get(url).headers["etag"]
    answer = admin.patch(url, json=change, headers={"If-Match": seen})
    assert answer.status_code == 200
    assert answer.json()["scopes"] == ["jobs:*"]
    assert answer.json()["name"] == "worker"
    assert answer.json()["expires_at"] is None
    late = admin.patch(url, json={"name": "late"}, headers={"If-Match": seen})
    refused(late, 412, "precondition_failed")
    weak = {"If-Match": f"W/{answer.headers['etag']}"}
    refused(admin.patch(url, json={}, headers=weak), 412, "precondition_failed")
    several = {"If-Match": f'"x", {answer.headers["etag"]}'}
    assert admin.patch(url, json={"name": "x"}, headers=several).status_code == 200
    assert admin.patch(url, json={}, headers={"If-Match": "*"}).status_code == 200


def test_new_scopes_hold_at_once(admin: TestClient) -> None:
    new = made(admin)
    assert works(admin, new["key"]) == 200
    change = {"scopes": ["usage:read"]}
    admin.patch(f"{KEYS}/{new['id']}", json=change, headers={"If-Match": "*"})
    assert works(admin, new["key"]) == 403


def test_an_end_is_set_moved_and_taken_away(admin: TestClient) -> None:
    new = made(admin, expires_in=60)
    url, anyhow = f"{KEYS}/{new['id']}", {"If-Match": "*"}
    later = admin.patch(url, json={"expires_in": 7200}, headers=anyhow).json()
    assert later["expires_at"] > new["expires_at"]
    never = admin.patch(url, json={"expires_in": None}, headers=anyhow).json()
    assert never["expires_at"] is None
    same = admin.patch(url, json={"name": "same"}, headers=anyhow).json()
    assert same["expires_at"] is None


def test_two_keys_live_while_callers_move_from_one_to_the_other(
    admin: TestClient, refused: Refused
) -> None:
    old = made(admin, expires_in=7 * 86_400, kind="service")
    answer = admin.post(f"{KEYS}/{old['id']}/rotate", json={"overlap_seconds": 3600})
    new = answer.json()
    assert answer.status_code == 201
    assert works(admin, old["key"]) == works(admin, new["key"]) == 200
    same = ("name", "scopes", "kind")
    assert [new[name] for name in same] == [old[name] for name in same]
    life = datetime.fromisoformat(new["expires_at"]) - datetime.now(UTC)
    assert timedelta(days=6.9) < life < timedelta(days=7.1)
    assert new["replaces"]["id"] == old["id"]
    ends = datetime.fromisoformat(new["replaces"]["expires_at"])
    assert ends - datetime.now(UTC) < timedelta(hours=1.1)
    at_once = admin.post(f"{KEYS}/{new['id']}/rotate", json={"overlap_seconds": 0})
    assert works(admin, new["key"]) == 401
    assert works(admin, at_once.json()["key"]) == 200
    again = admin.post(f"{KEYS}/{new['id']}/rotate")
    problem = refused(again, 409, "invalid_state")
    assert problem["current_status"] == "expired"


def test_rotation_needs_no_body_and_never_prolongs(admin: TestClient) -> None:
    old = made(admin, expires_in=60)
    new = admin.post(f"{KEYS}/{old['id']}/rotate").json()
    assert new["replaces"]["expires_at"] == old["expires_at"]


def test_a_revoked_key_stays_revoked(admin: TestClient, refused: Refused) -> None:
    new = made(admin)
    url = f"{KEYS}/{new['id']}"
    assert works(admin, new["key"]) == 200
    assert [admin.delete(url).status_code for _ in range(2)] == [204, 204]
    assert works(admin, new["key"]) == 401
    assert admin.get(url).json()["status"] == "revoked"
    refused(admin.post(f"{url}/rotate"), 409, "invalid_state")
    change = admin.patch(url, json={"expires_in": None}, headers={"If-Match": "*"})
    refused(change, 409, "invalid_state")


def test_unknown_revoked_and_expired_are_refused_in_the_same_words(
    admin: TestClient,
) -> None:
    revoked, expired = made(admin), made(admin, expires_in=60)
    admin.delete(f"{KEYS}/{revoked['id']}")
    with db.transaction() as session:
        row = session.get(ApiKey, expired["id"])
        assert row is not None
        row.expires_at = now() - timedelta(seconds=1)
    near = revoked["key"][:-8] + ("A" if revoked["key"][-8] != "A" else "B")
    said = []
    for key in (revoked["key"], expired["key"], auth._sealed(near), "junk"):
        answer = admin.get("/v1/jobs", headers=bearer(key))
        body = answer.json() | {"request_id": ""}
        said.append((answer.status_code, json.dumps(body)))
    assert len(set(said)) == 1
    assert said[0][0] == 401


def test_the_last_admin_key_is_not_taken_away(
    admin: TestClient, refused: Refused
) -> None:
    url = f"{KEYS}/{own_id(admin)}"
    anyhow = {"If-Match": "*"}
    refused(admin.delete(url), 409, "last_admin_key")
    narrow = admin.patch(url, json={"scopes": ["jobs:*"]}, headers=anyhow)
    refused(narrow, 409, "last_admin_key")
    assert admin.patch(url, json={"name": "root"}, headers=anyhow).status_code == 200
    second = made(admin, scopes=["admin", "jobs:read"])
    assert admin.delete(url).status_code == 204
    with db.transaction() as session:  # another tenant's admins do not count
        auth.create_key(session, "other", "admin", ["admin"])
    admin.headers |= bearer(second["key"])
    refused(admin.delete(f"{KEYS}/{second['id']}"), 409, "last_admin_key")


def test_only_admins_get_here(admin: TestClient, refused: Refused) -> None:
    reader = bearer(made(admin, scopes=["jobs:*", "models:*"])["key"])
    asked = [
        admin.get(KEYS, headers=reader),
        admin.post(KEYS, headers=reader, json=READER | {"scopes": ["admin"]}),
        admin.delete(f"{KEYS}/{own_id(admin)}", headers=reader),
    ]
    for answer in asked:
        problem = refused(answer, 403, "insufficient_scope")
        assert problem["required_scope"] == "admin"


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"scopes": ["jobs:rm"]}, "/scopes/0"),
        ({"scopes": []}, "/scopes"),
        ({"scopes": None}, "/scopes"),
        ({"scopes": "admin"}, "/scopes"),
        ({"scopes": ["jobs:read"] * 21}, "/scopes"),
        ({"name": ""}, "/name"),
        ({"name": "a\nb"}, "/name"),
        ({"name": "x" * 129}, "/name"),
        ({"kind": "robot"}, "/kind"),
        ({"expires_in": 0}, "/expires_in"),
        ({"expires_in": 1e400}, "/expires_in"),
        ({"expires_in": 10**12}, "/expires_in"),
        ({"expires_in": "60"}, "/expires_in"),
        ({"key": "po_live_mine"}, "/key"),
    ],
)
def test_a_bad_request_names_the_field(
    client: TestClient, refused: Refused, body: Json, pointer: str
) -> None:
    answer = client.post(
        KEYS,
        content=json.dumps(READER | body),
        headers={"Content-Type": "application/json"},
    )
    refused(answer, 422, "validation_error", pointer)
    change = client.patch(
        f"{KEYS}/{own_id(client)}",
        content=json.dumps(body),
        headers={"Content-Type": "application/json", "If-Match": "*"},
    )
    if pointer != "/kind":
        refused(change, 422, "validation_error", pointer)


def test_an_installation_on_trial_makes_keys_that_say_so(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from api.settings import settings

    monkeypatch.setenv("PRECISION_KEY_MODE", "test")
    settings.cache_clear()
    key = made(client)["key"]
    assert key.startswith("po_test_")
    assert works(client, key) == 200


def test_what_admins_do_is_written_down(admin: TestClient) -> None:
    new = made(admin)
    url = f"{KEYS}/{new['id']}"
    admin.patch(url, json={"name": "x"}, headers={"If-Match": "*"})
    newer = admin.post(f"{url}/rotate").json()["id"]
    admin.delete(url)
    admin.delete(url)
    with db.reading() as session:
        caller = auth.verify(session, admin.headers["authorization"])
        rows, _ = audit.page(session, caller.tenant_id, 10)
        told = [(row.action, row.target, row.actor) for row in reversed(rows)]
        details = [row.details for row in reversed(rows)]
        assert all(row.request_id for row in rows)
    actions = ("created", "updated", "rotated", "revoked")
    assert told == [(f"api_key.{a}", new["id"], own_id(admin)) for a in actions]
    assert details[1]["changed"] == ["name"]
    assert details[2]["new"] == newer
    assert new["key"] not in json.dumps(details)
