"""Webhook endpoints and deliveries over HTTP."""

import base64
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from api import audit, auth
from api.app import create_app
from api.db import reading, transaction
from api.metrics import Metrics
from api.settings import settings
from tests.api.conftest import BODY, Refused
from tests.api.hooks import take, tell

Json = dict[str, Any]
URL = "https://hooks.example.com/a"
ALL = "/v1/webhook_endpoints"


@pytest.fixture
def made(client: TestClient) -> Json:
    answer = client.post(ALL, json={"url": URL, "description": "portal"})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


@pytest.fixture
def one(made: Json) -> str:
    return f"{ALL}/{made['id']}"


@pytest.fixture
def foreign(sqlite: Path) -> dict[str, str]:
    """The headers of another tenant."""
    with transaction() as session:
        return {"Authorization": f"Bearer {auth.create_key(session, 'other', 'test')}"}


def tag(answer: httpx.Response) -> dict[str, str]:
    return {"If-Match": answer.headers["ETag"]}


def test_the_secret_is_shown_once(client: TestClient, made: Json, one: str) -> None:
    secret = made["secret"]
    assert secret.startswith("whsec_")
    assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32
    assert made["events"] == [
        "job.cancelled",
        "job.expired",
        "job.failed",
        "job.succeeded",
    ]
    seen = client.get(one)
    assert seen.status_code == 200
    assert "secret" not in seen.json()
    assert {**seen.json(), "secret": secret} == made
    (listed,) = client.get(ALL).json()["data"]
    assert listed == seen.json()
    assert seen.json()["enabled"] is True


def test_lists_come_in_pages(client: TestClient) -> None:
    ids = [client.post(ALL, json={"url": URL}).json()["id"] for _ in range(5)]
    seen: list[str] = []
    after: Json = {}
    while True:
        page = client.get(ALL, params={"limit": 2, **after}).json()
        seen += [row["id"] for row in page["data"]]
        if not page["has_more"]:
            break
        after = {"after": page["next_cursor"]}
    assert seen == sorted(ids, reverse=True)


def test_an_edit_names_the_version_that_it_edits(
    client: TestClient, one: str, refused: Refused
) -> None:
    first = client.get(one)
    change = {"url": "https://other.example.com/b", "events": ["job.started"]}
    refused(client.patch(one, json=change), 428, "precondition_required")
    changed = client.patch(one, json=change, headers=tag(first))
    assert changed.status_code == 200
    assert changed.json()["url"] == change["url"]
    assert changed.json()["events"] == ["job.started"]
    assert changed.json()["description"] == "portal"  # what was not said stays
    assert changed.headers["ETag"] != first.headers["ETag"]
    late = client.patch(one, json={"description": "x"}, headers=tag(first))
    refused(late, 412, "precondition_failed")
    nothing = client.patch(one, json={}, headers=tag(changed))
    assert nothing.headers["ETag"] == changed.headers["ETag"]


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({}, "/url"),
        ({"url": ""}, "/url"),
        ({"url": 5}, "/url"),
        ({"url": "http://example.com/"}, "/url"),
        ({"url": "https://169.254.169.254/"}, "/url"),
        ({"url": "https://[64:ff9b::a9fe:a9fe]/"}, "/url"),
        ({"url": "https://user:pw@example.com/"}, "/url"),
        ({"url": "https://example.com/" + "a" * 2048}, "/url"),
        ({"url": URL, "events": []}, "/events"),
        ({"url": URL, "events": ["job.progress"]}, "/events/0"),
        ({"url": URL, "events": ["job.failed"] * 12}, "/events"),
        ({"url": URL, "events": "job.failed"}, "/events"),
        ({"url": URL, "format": "teams"}, "/format"),
        ({"url": URL, "description": "a\nb"}, "/description"),
        ({"url": URL, "description": "a" * 257}, "/description"),
        ({"url": URL, "secret": "whsec_mine"}, "/secret"),
    ],
)
def test_bad_endpoints_are_refused_where_they_are_wrong(
    client: TestClient, refused: Refused, body: Json, pointer: str
) -> None:
    answer = client.post(ALL, json=body)
    problem = refused(answer, 422, answer.json()["code"], pointer)
    assert "pw@" not in str(problem)
    assert client.get(ALL).json()["data"] == []


@pytest.mark.parametrize("name", ["url", "events", "description", "format", "enabled"])
def test_null_is_no_value(
    client: TestClient, one: str, refused: Refused, name: str
) -> None:
    answer = client.patch(one, json={name: None}, headers=tag(client.get(one)))
    refused(answer, 422, "validation_error", f"/{name}")


def test_too_many_endpoints_are_refused(
    client: TestClient, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRECISION_WEBHOOK_MAX_ENDPOINTS", "2")
    settings.cache_clear()
    for _ in range(2):
        assert client.post(ALL, json={"url": URL}).status_code == 201
    problem = refused(client.post(ALL, json={"url": URL}), 429, "quota_exceeded")
    assert problem["limit"] == 2


def test_a_rotation_shows_a_new_secret_and_says_how_long_the_old_one_lives(
    client: TestClient, made: Json, one: str
) -> None:
    rotated = client.post(f"{one}/rotate_secret").json()
    assert rotated["secret"] != made["secret"]
    ends_at = datetime.fromisoformat(rotated["old_secret_expires_at"])
    day = timedelta(days=1)
    assert day - timedelta(minutes=1) < ends_at - datetime.now(UTC) <= day
    assert "secret" not in client.get(one).json()


def test_a_test_is_a_delivery_like_any_other(client: TestClient, one: str) -> None:
    answer = client.post(f"{one}/test")
    assert answer.status_code == 202
    delivery = answer.json()
    assert (delivery["event_type"], delivery["state"]) == ("webhook.test", "pending")
    assert delivery["attempts"] == []
    (letter,) = take()
    assert letter.id == delivery["id"]
    tell(letter, 500)
    (failed,) = client.get(f"{one}/deliveries", params={"state": "failed"}).json()[
        "data"
    ]
    assert failed["id"] == delivery["id"]
    assert failed["attempts"][0]["status"] == 500
    assert failed["next_attempt_at"] is None
    assert client.get(f"{one}/deliveries?state=delivered").json()["data"] == []
    again = client.post(f"/v1/deliveries/{delivery['id']}/replay")
    assert (again.status_code, again.json()["state"]) == (202, "pending")
    assert again.json()["message_id"] == delivery["message_id"]


def test_deliveries_come_in_pages_of_their_endpoint(
    client: TestClient, one: str, refused: Refused
) -> None:
    ids = [client.post(f"{one}/test").json()["id"] for _ in range(3)]
    other = client.post(ALL, json={"url": URL}).json()["id"]
    page = client.get(f"{one}/deliveries", params={"limit": 2}).json()
    rest = client.get(f"{one}/deliveries", params={"after": page["next_cursor"]}).json()
    found = [row["id"] for row in page["data"] + rest["data"]]
    assert found == sorted(ids, reverse=True)
    stolen = {"after": page["next_cursor"]}
    refused(client.get(f"{ALL}/{other}/deliveries", params=stolen), 400, "bad_cursor")


def test_a_disabled_endpoint_takes_no_tests_and_no_replays(
    client: TestClient, one: str, refused: Refused
) -> None:
    delivery = client.post(f"{one}/test").json()
    off = client.patch(one, json={"enabled": False}, headers=tag(client.get(one)))
    assert off.json()["enabled"] is False
    refused(client.post(f"{one}/test"), 409, "invalid_state")
    replay = f"/v1/deliveries/{delivery['id']}/replay"
    refused(client.post(replay), 409, "invalid_state")
    client.patch(one, json={"enabled": True}, headers=tag(off))
    assert client.post(replay).status_code == 202


def test_what_is_deleted_is_gone(
    client: TestClient, one: str, refused: Refused
) -> None:
    delivery = client.post(f"{one}/test").json()
    assert client.delete(one).status_code == 204
    refused(client.get(one), 404, "not_found")
    refused(client.delete(one), 404, "not_found")
    replay = f"/v1/deliveries/{delivery['id']}/replay"
    refused(client.post(replay), 404, "not_found")


def test_nothing_of_another_tenant_is_there(
    client: TestClient, one: str, refused: Refused, foreign: dict[str, str]
) -> None:
    delivery = client.post(f"{one}/test").json()
    etag = tag(client.get(one))
    asked = [
        client.get(one, headers=foreign),
        client.patch(one, json={"enabled": False}, headers={**foreign, **etag}),
        client.delete(one, headers=foreign),
        client.post(f"{one}/test", headers=foreign),
        client.post(f"{one}/rotate_secret", headers=foreign),
        client.get(f"{one}/deliveries", headers=foreign),
        client.post(f"/v1/deliveries/{delivery['id']}/replay", headers=foreign),
    ]
    for answer in asked:
        refused(answer, 404, "not_found")
    assert client.get(ALL, headers=foreign).json()["data"] == []
    assert client.get(one).json()["enabled"] is True


def test_who_changed_what_is_written_down(client: TestClient, one: str) -> None:
    client.patch(one, json={"enabled": False}, headers=tag(client.get(one)))
    client.post(f"{one}/rotate_secret")
    client.delete(one)
    with reading() as session:
        (tenant_id,) = {row.tenant_id for row in session.query(audit.AuditEvent)}
        rows, _ = audit.page(session, tenant_id, 100)
    said = [row for row in reversed(rows) if row.action.startswith("webhook_")]
    verbs = [row.action.partition(".")[2] for row in said]
    assert verbs == ["created", "changed", "rotated", "deleted"]
    assert all(row.target == one.rpartition("/")[2] for row in said)
    assert "whsec_" not in str([row.details for row in said])


def test_a_job_may_name_its_endpoint_and_no_other_tenants(
    tiny: Path,
    client: TestClient,
    made: Json,
    refused: Refused,
    foreign: dict[str, str],
) -> None:
    theirs = client.post(ALL, json={"url": URL}, headers=foreign).json()["id"]
    body = {**BODY, "webhook": {"endpoint_id": theirs}}
    answer = client.post("/v1/optimize", json=body)
    refused(answer, 422, "unknown_webhook_endpoint", "/webhook/endpoint_id")
    other = client.post(ALL, json={"url": URL}).json()["id"]
    body = {**BODY, "webhook": {"endpoint_id": made["id"]}}
    job_id = client.post("/v1/optimize", json=body).json()["id"]
    client.post(f"/v1/jobs/{job_id}/cancel")
    (delivery,) = client.get(f"{ALL}/{made['id']}/deliveries").json()["data"]
    assert (delivery["event_type"], delivery["job_id"]) == ("job.cancelled", job_id)
    assert client.get(f"{ALL}/{other}/deliveries").json()["data"] == []


def test_every_event_is_described_with_its_body(sqlite: Path) -> None:
    described = create_app().openapi()
    hooks = described["webhooks"]
    offered = described["components"]["schemas"]["JobEvent"]["enum"]
    assert {*offered, "webhook.test", "webhook_endpoint.disabled"} == set(hooks)
    for event, methods in hooks.items():
        said = methods["post"]
        assert said["operationId"] == "on_" + event.replace(".", "_")
        body = said["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert body.rpartition("/")[2] in described["components"]["schemas"]
        names = [parameter["name"] for parameter in said["parameters"]]
        assert names == ["webhook-id", "webhook-timestamp", "webhook-signature"]


def test_what_is_sent_is_what_is_described(
    tiny: Path, client: TestClient, made: Json
) -> None:
    from api.webhook_docs import EndpointWebhook, JobWebhook

    job_id = client.post("/v1/optimize", json=BODY).json()["id"]
    client.post(f"/v1/jobs/{job_id}/cancel")
    (letter,) = take()
    sent = JobWebhook.model_validate_json(letter.payload)
    assert set(sent.data.model_fields_set) == set(type(sent.data).model_fields)
    client.post(f"{ALL}/{made['id']}/test")
    tell(letter, 200)
    (letter,) = take()
    assert EndpointWebhook.model_validate_json(letter.payload).type == "webhook.test"


def test_prometheus_reads_what_waits_and_what_ended(
    client: TestClient, one: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.webhook_metrics.SETTLED", timedelta())
    metrics = Metrics(lambda: 0)

    def read() -> dict[str, float]:
        lines = metrics.render().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if line[0] != "#")
        return {name.removeprefix("precision_"): float(n) for name, _, n in pairs}

    for _ in range(3):
        client.post(f"{one}/test")
    assert read()["outbox_unpublished"] == 3
    assert 0 <= read()["outbox_lag_seconds"] < 60
    (letter,) = take()
    tell(letter, 200)
    (letter,) = take()
    tell(letter, 500)
    for _ in range(2):  # the second look counts nothing twice
        seen = read()
        assert seen["outbox_unpublished"] == 1
        assert seen['webhook_deliveries_total{result="delivered"}'] == 1
        assert seen['webhook_deliveries_total{result="failed"}'] == 1
        assert seen["webhook_delivery_seconds_count"] == 2
