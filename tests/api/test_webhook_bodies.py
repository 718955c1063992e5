"""What a webhook says, in each format."""

import json
from datetime import datetime

import pytest

from api import jobs, webhook_bodies
from api.db import reading, transaction
from api.settings import settings
from api.webhook_bodies import Format, JobEvent
from optimizer.spec import OptimizeSpec
from tests.api.hooks import (
    EVERY,
    deliveries,
    endpoint,
    finish,
    submitted,
    tenant_named,
    types,
)

pytestmark = pytest.mark.usefixtures("sqlite")

ERROR = {"code": "non_finite", "category": "model", "retryable": False, "message": "m"}


@pytest.fixture
def tenant(sqlite: object) -> str:
    return tenant_named("acme")


def test_progress_is_for_streams_alone(tenant: str) -> None:
    curious = endpoint(tenant, *EVERY)
    job_id = submitted(tenant)
    with transaction() as session:
        claim = jobs.claim(session, job_id, "worker-1")
        assert claim is not None
        jobs.progress(session, claim, "load", 1.0)
    assert "job.phase_changed" in types(curious.id)
    assert "job.progress" not in types(curious.id)
    assert "job.progress" not in webhook_bodies.SUBSCRIBABLE


def test_the_body_is_thin_and_its_id_is_that_of_the_event(
    tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRECISION_PUBLIC_URL", "https://precision.example/base/")
    settings.cache_clear()
    hook = endpoint(tenant)
    job_id = submitted(tenant, {"model": "tiny", "metadata": {"team": "ads"}})
    finish(job_id)
    (delivery,) = deliveries(hook.id)
    with reading() as session:
        *_, event = jobs.events(session, tenant, job_id, 0, 100)
    body = json.loads(delivery.payload)
    assert body["type"] == "job.succeeded"
    assert datetime.fromisoformat(body["timestamp"]) == event.at
    assert body["timestamp"].endswith("Z")
    assert body["data"] == {
        "job_id": job_id,
        "status": "succeeded",
        "phase": None,
        "outcome": "sla_met",
        "error_code": None,
        "report_url": f"https://precision.example/base/v1/jobs/{job_id}/report",
        "job_url": f"https://precision.example/base/ui/jobs/{job_id}",
        "hardware": "h100",
        "model": "tiny",
        "metadata": {"team": "ads"},
    }
    assert delivery.message_id == f"evt_{job_id.removeprefix('job_')}_{event.seq}"


def test_a_failed_job_says_its_code_and_has_no_report(tenant: str) -> None:
    hook = endpoint(tenant)
    job_id = submitted(tenant)
    with transaction() as session:
        claim = jobs.claim(session, job_id, "worker-1")
        assert claim is not None
        jobs.fail(session, claim, ERROR)
    data = json.loads(deliveries(hook.id)[0].payload)["data"]
    assert (data["status"], data["error_code"]) == ("failed", "non_finite")
    assert data["report_url"] is None


def test_large_metadata_is_left_out(tenant: str) -> None:
    hook = endpoint(tenant, JobEvent.CREATED)
    metadata = {f"k{i}": "\x01" * 512 for i in range(16)}  # six bytes each, escaped
    submitted(tenant, {"model": "tiny", "metadata": metadata})
    payload = deliveries(hook.id)[0].payload
    assert len(payload.encode()) < 20_000
    assert json.loads(payload)["data"]["metadata"] is None


def test_slack_reads_a_sentence_without_markup_of_others(
    tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRECISION_PUBLIC_URL", "https://precision.example")
    settings.cache_clear()
    hook = endpoint(tenant, shape=Format.SLACK)
    spec = OptimizeSpec("<!channel> & co", "/models/tiny", "0" * 64, "h100")
    with transaction() as session:
        job_id = jobs.submit(session, tenant, spec, {}).id
    finish(job_id)
    body = json.loads(deliveries(hook.id)[0].payload)
    assert list(body) == ["text"]
    assert body["text"] == (
        f"{job_id} succeeded: sla_met (&lt;!channel&gt; &amp; co on h100)\n"
        f"<https://precision.example/ui/jobs/{job_id}|Open the job>"
    )


def test_port_links_to_the_page_and_the_report(
    tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRECISION_PUBLIC_URL", "https://precision.example")
    settings.cache_clear()
    hook = endpoint(tenant, shape=Format.PORT)
    job_id = submitted(tenant)
    finish(job_id)
    base = "https://precision.example"
    assert json.loads(deliveries(hook.id)[0].payload)["link"] == [
        f"{base}/ui/jobs/{job_id}",
        f"{base}/v1/jobs/{job_id}/report",
    ]


def test_port_gets_the_update_of_an_action_run(tenant: str) -> None:
    hook = endpoint(tenant, *EVERY, shape=Format.PORT)
    good, bad = submitted(tenant), submitted(tenant)
    finish(good)
    with transaction() as session:
        jobs.cancel(session, tenant, bad)
    bodies = [json.loads(delivery.payload) for delivery in deliveries(hook.id)]
    ends = {b["externalRunId"]: b["status"] for b in bodies if "status" in b}
    assert ends == {good: "SUCCESS", bad: "FAILURE"}
    labels = {body["statusLabel"] for body in bodies if "status" not in body}
    assert labels == {"job.created", "job.queued", "job.started"}
    known = {"status", "statusLabel", "summary", "link", "externalRunId"}
    assert all(set(body) <= known for body in bodies)
