"""Spans of the real API and of real workers, whose processes go after each job."""

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import httpx
import pytest

from tests.collector import Collector, Span, collecting
from tests.faults.conftest import LIGHT
from tests.faults.numerics import ENDS, PHASES
from tests.faults.test_service import body
from tests.receiver import receiver
from tests.service import Service, eventually, service, tiny_model

pytestmark = [pytest.mark.service, pytest.mark.slow]

JOBS = 6
RUN = "precision.run_job"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as listening:
        yield listening


@pytest.fixture(scope="module")
def running(
    collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("traced")
    tiny_model(folder / "models" / "tiny")
    own = {
        "PRECISION_DATA_DIR": str(folder),
        "PRECISION_OTLP_ENDPOINT": collector.url,
        "PRECISION_WEBHOOK_ALLOW": "127.0.0.1",
        "PRECISION_MAX_RUNNING": "8",
        "OTEL_BSP_SCHEDULE_DELAY": "200",  # ms; of the API, whose process stays
    }
    with service(folder, "--workers", "2", environment=LIGHT | own) as started:
        yield started


def asked(running: Service, number: int, *, seed: int = 0) -> tuple[str, str, str]:
    """Ask for a job in a trace of its own; return its id, the trace and the caller."""
    trace, caller = secrets.token_hex(16), secrets.token_hex(8)
    answer = httpx.post(
        f"{running.address['url']}/v1/optimize",
        json=body(seed or number),
        headers={
            "Authorization": f"Bearer {running.key}",
            "traceparent": f"00-{trace}-{caller}-01",
            "X-Request-Id": f"req.{number}",
        },
        trust_env=False,
        timeout=60,
    )
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"]), trace, caller


def only(spans: list[Span]) -> Span:
    (span,) = spans
    return span


def arrived(collector: Collector, count: int, **wanted: str) -> list[Span]:
    """Wait for so many spans; more than those are a failure, too."""
    eventually(lambda: len(collector.spans(**wanted)) >= count, 60)
    found = collector.spans(**wanted)
    assert len(found) == count, [span.name for span in collector.spans()]
    return found


def final(running: Service, job_id: str) -> str:
    def status() -> str | None:
        job = running.client.job(job_id)
        return str(job["status"]) if job["timestamps"]["finished_at"] else None

    found = eventually(status, 120)
    assert found is not None, job_id
    return str(found)


def test_every_job_goes_on_in_its_callers_trace(
    running: Service, collector: Collector
) -> None:
    with ThreadPoolExecutor(JOBS) as pool:
        made = list(pool.map(lambda n: asked(running, n), range(JOBS)))
    assert {final(running, job_id) for job_id, _, _ in made} == {"succeeded"}
    for job_id, trace, caller in made:
        (ran,) = arrived(collector, 1, trace=trace, name=RUN)
        request = only(collector.spans(trace=trace, kind="server"))
        assert (request.name, request.parent) == ("POST /v1/optimize", caller)
        assert request.said["http.response.status_code"] == 202
        assert (ran.kind, ran.parent, ran.error) == ("consumer", request.id, None)
        assert (request.service, ran.service) == ("precision-api", "precision-worker")
        assert (
            ran.said["precision.job_id"] == request.said["precision.job_id"] == job_id
        )
        assert ran.said["precision.request_id"].startswith("req.")
        phases = collector.spans(trace=trace, kind="internal")
        assert [phase.name for phase in phases] == [*PHASES, "store"]
        assert {phase.parent for phase in phases} == {ran.id}
        assert ran.begun <= phases[0].begun
        assert phases[-1].ended <= ran.ended
        # One after the other: a phase ends where the next begins.
        assert all(a.ended <= b.begun for a, b in pairwise(phases))
        assert len(collector.spans(trace=trace)) == 2 + len(phases)
    sent = b"".join(came.body for came in collector.receiver.received)
    for secret in (running.key, "web_text", "Bearer", "default"):
        assert secret.encode() not in sent


def test_every_attempt_has_a_span_and_says_what_became_of_it(
    running: Service, collector: Collector
) -> None:
    job_id, trace, _ = asked(running, 99, seed=ENDS)
    assert final(running, job_id) == "failed"
    attempts = int(running.client.job(job_id)["attempt"])
    assert attempts > 1
    spans = arrived(collector, attempts, trace=trace, name=RUN)
    assert [s.said["precision.attempt"] for s in spans] == list(range(1, attempts + 1))
    assert {s.error for s in spans} == {"process_lost"}
    last = [s for s in collector.spans(trace=trace, kind="internal") if s.error]
    # The process ended before it said that the next phase had begun.
    assert [(s.name, s.error) for s in last] == [("calibrate", "Crashed")] * attempts


def test_requests_are_called_by_their_route(
    running: Service, collector: Collector
) -> None:
    url, trace = running.address["url"], secrets.token_hex(16)
    headers = {
        "Authorization": f"Bearer {running.key}",
        "traceparent": f"00-{trace}-{secrets.token_hex(8)}-01",
    }
    with httpx.Client(base_url=url, headers=headers, trust_env=False) as client:
        client.get("/v1/jobs/job_secret-of-mine?after=secret-too")
        client.get("/nowhere/secret-three")
        client.get("/livez")
        client.get("/metrics")
        client.get("/v1/hardware", headers={"traceparent": "rubbish"})
        unsampled = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"
        client.get("/v1/hardware", headers={"traceparent": unsampled})
    refused, nowhere = arrived(collector, 2, trace=trace)
    assert (refused.name, nowhere.name) == ("GET /v1/jobs/{job_id}", "GET")
    assert refused.said["http.response.status_code"] == 422
    assert "http.route" not in nowhere.said
    (own,) = arrived(collector, 1, name="GET /v1/hardware")  # the other was not wanted
    assert own.parent == ""
    sent = b"".join(came.body for came in collector.receiver.received)
    assert b"secret" not in sent


def test_a_webhook_has_a_span_that_its_receiver_may_go_on_with(
    running: Service, collector: Collector
) -> None:
    with receiver() as portal:
        made = running.client.add_webhook({"url": portal.url(path="/s3cr3t")})
        job_id, _, _ = asked(running, 50)
        assert final(running, job_id) == "succeeded"
        assert eventually(lambda: portal.received, 60)
        running.client.delete_webhook(made["id"])
    came = portal.received[0].headers
    (span,) = arrived(collector, 1, kind="client")
    assert came["traceparent"].startswith(f"00-{span.trace}-{span.id}-0")
    assert span.said["precision.webhook_id"] == came["webhook-id"]
    assert span.said["http.response.status_code"] == 200
    assert (span.said["server.address"], span.error) == ("127.0.0.1", None)
    sent = b"".join(each.body for each in collector.receiver.received)
    assert b"s3cr3t" not in sent
