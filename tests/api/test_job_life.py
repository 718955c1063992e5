"""What an owner does with a job: wait for it, run it again, delete it."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api import db, jobs, settings, storage
from api.models import AuditEvent, Job
from tests.api.conftest import BODY, Refused, write_model
from tests.service import eventually

pytestmark = pytest.mark.both


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, data_dir: Path) -> None:
    monkeypatch.setenv("PRECISION_STREAM_POLL_S", "0.05")
    settings.settings.cache_clear()


def later(act: Any, seconds: float = 0.3) -> threading.Timer:
    timer = threading.Timer(seconds, act)
    timer.start()
    return timer


def run(job_id: str) -> None:
    with db.transaction() as session:
        assert jobs.claim(session, job_id, "worker-1") is not None


def cancel(job_id: str, tenant: str) -> None:
    with db.transaction() as session:
        jobs.cancel(session, tenant, job_id)


def row(job_id: str) -> Job:
    with db.reading() as session:
        found = session.get(Job, job_id)
    assert found is not None
    return found


# -- waiting -------------------------------------------------------------------


def test_an_etag_is_good_until_the_job_changes(job_id: str, client: TestClient) -> None:
    url = f"/v1/jobs/{job_id}"
    first = client.get(url)
    etag = first.headers["etag"]
    assert etag.startswith('W/"')
    same = client.get(url, headers={"If-None-Match": f'"x", {etag}'})
    assert (same.status_code, same.content) == (304, b"")
    assert same.headers["etag"] == etag
    assert int(first.headers["retry-after"]) == first.json()["poll_after_seconds"]
    run(job_id)
    other = client.get(url, headers={"If-None-Match": etag})
    assert (other.status_code, other.json()["status"]) == (200, "running")
    assert other.headers["etag"] != etag


def test_a_long_poll_ends_when_the_job_changes(job_id: str, client: TestClient) -> None:
    url = f"/v1/jobs/{job_id}"
    etag = client.get(url).headers["etag"]
    for headers in ({}, {"If-None-Match": etag}):
        begun = time.monotonic()
        timer = later(lambda: None if row(job_id).attempt else run(job_id))
        answer = client.get(url, params={"wait": 30}, headers=headers)
        timer.join()
        assert (answer.status_code, answer.json()["status"]) == (200, "running")
        assert time.monotonic() - begun < 10
    known = {"If-None-Match": answer.headers["etag"]}
    begun = time.monotonic()
    answer = client.get(url, params={"wait": 1}, headers=known)
    assert answer.status_code == 304  # nothing happened
    assert time.monotonic() - begun >= 1


def test_nobody_waits_for_a_job_that_has_ended(done: str, client: TestClient) -> None:
    begun = time.monotonic()
    assert client.get(f"/v1/jobs/{done}", params={"wait": 60}).status_code == 200
    assert time.monotonic() - begun < 5


def test_waiting_holds_neither_thread_nor_connection(
    job_id: str, client: TestClient
) -> None:
    url = f"/v1/jobs/{job_id}"
    answers = []
    threads = [
        threading.Thread(
            target=lambda: answers.append(client.get(url, params={"wait": 20}))
        )
        for _ in range(60)  # more than the pool has threads
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    samples = []
    for _ in range(100):
        samples.append(db.engine().pool.checkedout())  # type: ignore[attr-defined]
        time.sleep(0.005)
    assert sorted(samples)[len(samples) // 2] <= 2  # nearly all the time
    assert client.get("/v1/jobs").status_code == 200
    cancel(job_id, row(job_id).tenant_id)
    for thread in threads:
        thread.join(10)
    assert {answer.json()["status"] for answer in answers} == {"cancelled"}
    assert len(answers) == 60


@pytest.mark.parametrize("wait", ["61", "-1", "soon"])
def test_a_wait_beyond_a_minute_is_refused(
    job_id: str, client: TestClient, refused: Refused, wait: str
) -> None:
    answer = client.get(f"/v1/jobs/{job_id}", params={"wait": wait})
    assert refused(answer, 422, "validation_error")["errors"][0]["parameter"] == "wait"


def test_a_preference_is_applied_and_told(
    tiny: Path, client: TestClient, bells: list[str]
) -> None:
    for said, applied in [
        ("respond-async", "respond-async"),
        ("respond-async, wait=0", "respond-async, wait=0"),
        ("wait=1; x, handling=lenient", "wait=1"),
        ("return=minimal", None),
        ("wait=soon", None),
    ]:
        answer = client.post("/v1/optimize", json=BODY, headers={"Prefer": said})
        assert answer.status_code == 202
        assert answer.headers.get("preference-applied") == applied, said


def test_a_creation_waits_for_the_end(
    tiny: Path, client: TestClient, bells: list[str]
) -> None:
    def end() -> None:
        assert eventually(lambda: bells)
        cancel(bells[0], row(bells[0]).tenant_id)

    timer = later(end, 0.1)
    headers = {"Prefer": "wait=999", "Idempotency-Key": "k"}
    answer = client.post("/v1/optimize", json=BODY, headers=headers)
    timer.join()
    assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
    assert answer.headers["preference-applied"] == "wait=60"
    assert answer.headers["location"] == f"/v1/jobs/{bells[0]}"
    again = client.post("/v1/optimize", json=BODY, headers=headers)
    assert (again.status_code, again.json()["status"]) == (202, "queued")  # as it was


# -- what a job carries --------------------------------------------------------


def test_a_job_carries_what_the_request_says(tiny: Path, client: TestClient) -> None:
    traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    body = {
        **BODY,
        "priority": 7,
        "expires_in": 60,
        "search": {"max_runtime_seconds": 30},
    }
    headers = {"traceparent": traceparent, "X-Request-Id": "mine.1"}
    job = client.post("/v1/optimize", json=body, headers=headers).json()
    found = row(job["id"])
    assert (found.priority, found.run_limit_s) == (7, 30)
    assert (found.expires_at - found.created_at).total_seconds() == 60
    assert (found.traceparent, found.request_id) == (traceparent, "mine.1")
    assert found.created_by
    assert (job["priority"], job["attempt"], job["warnings"]) == (7, 0, [])
    assert job["retried_from"] is None
    assert client.get(f"/v1/jobs/{job['id']}").json()["queue_position"] == 1


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00-x",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
    ],
)
def test_a_trace_that_is_none_is_left_out(header: str) -> None:
    from api.orders import traceparent

    assert traceparent(header) is None


@pytest.mark.parametrize(
    ("pointer", "change"),
    [
        ("/priority", {"priority": 11}),
        ("/priority", {"priority": "high"}),
        ("/expires_in", {"expires_in": 0}),
        ("/expires_in", {"expires_in": 30 * 86_400}),  # the setting allows 7 days
        ("/search/max_runtime_seconds", {"search": {"max_runtime_seconds": 90_000}}),
        ("/webhook", {"webhook": "we_1"}),
    ],
)
def test_what_a_job_cannot_carry_is_refused(
    tiny: Path, client: TestClient, refused: Refused, pointer: str, change: Any
) -> None:
    answer = client.post("/v1/optimize", json={**BODY, **change})
    refused(answer, 422, "validation_error", pointer)


def test_an_endpoint_that_is_not_yours_is_unknown(
    tiny: Path, client: TestClient, refused: Refused
) -> None:
    body = {**BODY, "webhook": {"endpoint_id": "we_none"}}
    answer = client.post("/v1/optimize", json=body)
    refused(answer, 422, "unknown_webhook_endpoint", "/webhook/endpoint_id")


# -- again ---------------------------------------------------------------------


def test_a_retry_is_a_new_job_with_the_same_request(
    tiny: Path, client: TestClient, bells: list[str], refused: Refused
) -> None:
    body = {**BODY, "priority": 3, "metadata": {"team": "ads"}}
    first = client.post("/v1/optimize", json=body).json()
    url = f"/v1/jobs/{first['id']}/retry"
    problem = refused(client.post(url), 409, "invalid_state")
    assert problem["current_status"] == "queued"
    client.post(f"/v1/jobs/{first['id']}/cancel")
    answer = client.post(url)
    again = answer.json()
    assert answer.status_code == 202
    assert answer.headers["location"] == f"/v1/jobs/{again['id']}"
    assert again["retried_from"] == first["id"]
    for field in ("request", "metadata", "priority"):
        assert again[field] == first[field]
    assert bells == [first["id"], again["id"]]
    links = client.get(f"/v1/jobs/{first['id']}").json()["links"]
    assert links["retry"] == url


def test_a_model_that_has_changed_is_not_retried(
    tiny: Path, client: TestClient, refused: Refused, data_dir: Path
) -> None:
    import numpy as np

    body = {**BODY, "model": {"path": str(tiny)}}
    job = client.post("/v1/optimize", json=body).json()
    client.post(f"/v1/jobs/{job['id']}/cancel")
    for file in tiny.iterdir():
        file.unlink()
    tiny.rmdir()
    url = f"/v1/jobs/{job['id']}/retry"
    assert (
        "cannot be repeated"
        in refused(client.post(url), 409, "source_changed")["detail"]
    )
    write_model(tiny, extra=np.zeros((2, 2), dtype=np.float32))
    problem = refused(client.post(url), 409, "source_changed")
    assert "other weights" in problem["detail"]
    assert problem["retried_from"] == job["id"]


# -- away ----------------------------------------------------------------------


def test_a_deleted_job_leaves_a_tombstone(
    done: str, client: TestClient, refused: Refused
) -> None:
    url = f"/v1/jobs/{done}"
    for _ in range(2):
        answer = client.delete(url)
        assert (answer.status_code, answer.content) == (204, b"")
    job = client.get(url).json()
    assert job["timestamps"]["deleted_at"] is not None
    assert (job["status"], job["result"]) == ("succeeded", None)
    assert "report" not in job["links"]
    assert client.get("/v1/jobs").json()["data"] == []
    for part in ("report", "stack", "front", "trials", "artifacts/report.json"):
        refused(client.get(f"{url}/{part}"), 410, "artifact_expired")
    listed = client.get(f"{url}/artifacts").json()["data"]
    assert all(artifact["purged_at"] for artifact in listed)
    assert not (settings.settings().data_dir / "artifacts" / done).exists()
    assert client.get(f"{url}/events").status_code == 200
    assert client.post(f"{url}/retry").status_code == 202
    with db.reading() as session:
        actions = [each.action for each in session.query(AuditEvent)]
    assert actions.count("job.deleted") == 1


def test_only_what_has_ended_is_deleted(
    job_id: str, client: TestClient, refused: Refused
) -> None:
    problem = refused(client.delete(f"/v1/jobs/{job_id}"), 409, "invalid_state")
    assert problem["current_status"] == "queued"
    refused(client.delete("/v1/jobs/job_none"), 404, "not_found")


def test_a_storage_that_is_away_is_asked_again(
    done: str,
    client: TestClient,
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def away(_: str) -> None:
        raise OSError("no route")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "remove_job", away)
        refused(client.delete(f"/v1/jobs/{done}"), 503, "overloaded")
    assert client.delete(f"/v1/jobs/{done}").status_code == 204
    assert not (settings.settings().data_dir / "artifacts" / done).exists()
