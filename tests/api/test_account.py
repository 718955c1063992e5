"""What a tenant used, how much it may, and who did what, on both databases."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from api import audit, auth, db, jobs, settings, storage, tenants
from api.app import create_app
from api.models import Job, now
from optimizer.spec import WORKLOADS, OptimizeSpec
from tests.api.conftest import Json, Refused


@pytest.fixture
def acme(database: str, bells: list[str]) -> Iterator[TestClient]:
    """An admin of the tenant acme."""
    with db.transaction() as session:
        key = auth.create_key(session, "acme", "admin", ["admin"])
    headers = {"Authorization": f"Bearer {key}"}
    with TestClient(create_app(), headers=headers) as client:
        yield client


def submit(tenant: str = "acme", hardware: str = "h100") -> str:
    spec = OptimizeSpec("tiny", "/models/tiny", "0" * 64, hardware)
    with db.transaction() as session:
        owner = auth.tenant_named(session, tenant).id
        return jobs.submit(session, owner, spec, {"model": "tiny"}).id


def ended(ran_s: float = 0.0, **where: str) -> str:
    """Return a job that succeeded after so many seconds, with a file of 5 bytes."""
    job_id = submit(**where)
    with db.transaction() as session:
        claim = jobs.claim(session, job_id, "worker-1")
        assert claim is not None
        stored = [storage.put(job_id, 1, "report.json", b"12345")]
        jobs.succeed(session, claim, "sla_met", {}, stored)
        row = session.get(Job, job_id)
        assert row is not None
        assert row.finished_at is not None
        row.started_at = row.finished_at - timedelta(seconds=ran_s)
    return job_id


def usage(client: TestClient, **period: Any) -> Json:
    answer = client.get("/v1/usage", params=period)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_usage_adds_up_what_ended_by_device(acme: TestClient) -> None:
    ended(90.0)
    ended(30.0)
    ended(7.0, hardware="l4")
    ended(1000.0, tenant="other")
    submit()
    cancelled = submit()
    acme.post(f"/v1/jobs/{cancelled}/cancel")
    said = usage(acme)
    devices = {row["hardware"]: row for row in said["devices"]}
    assert list(devices) == ["h100", "l4"]
    # 90 + 30 s; the cancelled one never ran
    assert devices["h100"]["running_seconds"] == pytest.approx(120.0, abs=0.01)
    assert devices["l4"]["running_seconds"] == pytest.approx(7.0, abs=0.01)
    ways = ("jobs", "succeeded", "failed", "cancelled", "expired")
    assert [devices["h100"][way] for way in ways] == [3, 2, 0, 1, 0]
    assert said["created"] == 5
    assert said["now"] == {"queued": 1, "running": 0}
    assert said["storage"]["artifacts_bytes"] == 15
    with db.transaction() as session:
        assert jobs.claim_next(session, "worker-2", ["celery"]) is not None
    assert usage(acme)["now"] == {"queued": 0, "running": 1}


def test_a_period_has_its_first_moment_and_not_its_last(acme: TestClient) -> None:
    job = ended(1.0)
    at = now() - timedelta(days=40)
    with db.transaction() as session:
        session.execute(update(Job).where(Job.id == job).values(finished_at=at))
    assert usage(acme)["devices"] == []  # of the last 30 days
    later = (at + timedelta(seconds=1)).isoformat()
    assert len(usage(acme, since=at.isoformat(), until=later)["devices"]) == 1
    before = (at - timedelta(seconds=1)).isoformat()
    assert usage(acme, since=before, until=at.isoformat())["devices"] == []


@pytest.mark.parametrize(
    ("period", "parameter"),
    [
        ({"since": "2026-02-01T00:00:00Z", "until": "2026-01-01T00:00:00Z"}, "since"),
        ({"until": "0001-01-02T00:00:00Z"}, "until"),
        ({"until": "9999-12-31T23:59:59-14:00"}, "until"),
        ({"since": "2026-01-01T00:00:00"}, "since"),  # in which zone?
        ({"since": "yesterday"}, "since"),
        ({"since": "99999-01-01T00:00:00Z"}, "since"),
    ],
)
def test_a_period_that_is_none_is_refused(
    acme: TestClient, refused: Refused, period: Json, parameter: str
) -> None:
    problem = refused(acme.get("/v1/usage", params=period), 422, "validation_error")
    assert problem["errors"][0]["parameter"] == parameter


def test_limits_are_those_that_hold(
    acme: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRECISION_CREATES_PER_MINUTE", "0")
    monkeypatch.setenv("PRECISION_MAX_QUEUED", "7")
    settings.settings.cache_clear()
    submit()
    said = acme.get("/v1/limits").json()
    assert said["requests"]["creates_per_minute"] is None  # 0 is no limit
    assert said["requests"]["body_bytes"] == settings.settings().max_body_bytes
    assert (said["jobs"]["max_queued"], said["jobs"]["queued"]) == (7, 1)
    with db.transaction() as session:
        tenants.limit(session, tenants.get(session, "acme"), {"max_queued": 0})
    said = acme.get("/v1/limits").json()
    assert said["jobs"]["max_queued"] == 0  # the tenant's own


def test_audit_events_come_in_pages_and_are_found(
    acme: TestClient, refused: Refused
) -> None:
    with db.transaction() as session:
        owner = auth.tenant_named(session, "acme").id
        for number in range(5):
            action = "model.deleted" if number % 2 else "model.created"
            audit.record(session, owner, "someone", action, f"mdl_{number}", n=number)
        other = auth.tenant_named(session, "other").id
        audit.record(session, other, "someone", "model.created", "mdl_x")
    page = acme.get("/v1/audit_events", params={"limit": 3}).json()
    assert [event["target"] for event in page["data"]] == ["mdl_4", "mdl_3", "mdl_2"]
    after = {"limit": 3, "after": page["next_cursor"]}
    rest = acme.get("/v1/audit_events", params=after).json()
    assert [event["details"] for event in rest["data"]] == [{"n": 1}, {"n": 0}]
    assert (page["has_more"], rest["has_more"]) == (True, False)
    wanted = {"action": "model.created", "target": "mdl_2", "actor": "someone"}
    (found,) = acme.get("/v1/audit_events", params=wanted).json()["data"]
    assert found["target"] == "mdl_2"
    for name in wanted:
        assert acme.get("/v1/audit_events", params={name: "no"}).json()["data"] == []
    with db.transaction() as session:
        key = auth.create_key(session, "acme", "everyday")
    headers = {"Authorization": f"Bearer {key}"}
    answer = acme.get("/v1/audit_events", headers=headers)
    assert refused(answer, 403, "insufficient_scope")["required_scope"] == "admin"


def test_tasks_say_what_a_job_takes_for_granted(acme: TestClient) -> None:
    found = {task["id"]: task for task in acme.get("/v1/tasks").json()["data"]}
    assert set(found) == set(WORKLOADS)
    assert found["chat"]["workload"] == {
        "batch_size": 1,
        "prompt_tokens": 512,
        "output_tokens": 128,
        "tensor_parallel": 1,
    }
