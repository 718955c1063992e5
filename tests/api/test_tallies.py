"""What watchers count comes from the rows, on both databases."""

from datetime import timedelta

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from api import auth, jobs, tallies
from api.db import reading, transaction
from api.metrics import RUN_BUCKETS_S, WAIT_BUCKETS_S, Metrics
from api.models import Job, Status
from api.transitions import now
from optimizer.spec import OptimizeSpec

pytestmark = pytest.mark.usefixtures("database")

CONTRACT: dict[str, set[str]] = {
    "jobs_created": {"task", "hardware"},
    "jobs_finished": {"status", "outcome", "hardware"},
    "job_queue_wait_seconds": set(),
    "job_run_seconds": set(),
    "trials": {"result", "precision"},
    "trial_seconds": set(),
    "queue_depth": {"queue", "hardware"},
    "lease_lost": set(),
    "outbox_lag_seconds": set(),
    "outbox_unpublished": set(),
    "webhook_deliveries": {"result"},
    "webhook_delivery_seconds": set(),
    "http_request_duration_seconds": {"route", "method", "status"},
    "sse_streams": set(),
    "gpu_memory_used_bytes": {"device"},
    "build_info": {"version"},
}
SPEC = OptimizeSpec("tiny", "/models/tiny", "0" * 64, "h100")


@pytest.fixture
def rows(database: str) -> None:
    """A job that waits, one that succeeded and one whose worker was lost."""
    with transaction() as session:
        owner = auth.tenant_named(session, "acme").id
        made = [jobs.submit(session, owner, SPEC) for _ in range(3)]
        at = now(session)
        waiting, done, lost = (session.get_one(Job, job.id) for job in made)
        waiting.queued_at = at - timedelta(seconds=90)
        done.status, done.outcome = Status.SUCCEEDED, "sla_met"
        done.started_at = done.created_at + timedelta(seconds=4)
        done.finished_at = done.started_at + timedelta(seconds=200)
        lost.status, lost.attempts_lost = Status.FAILED, 2
        lost.started_at = lost.created_at + timedelta(seconds=40)
        lost.finished_at = lost.started_at + timedelta(seconds=20)


@pytest.mark.usefixtures("rows")
def test_states_ends_and_queues() -> None:
    with reading() as session:
        states = tallies.by_status(session)
        ended = {(r.status, r.outcome): r.total for r in tallies.finished(session)}
        assert tallies.queued(session) == {"h100": 1}
        assert tallies.attempts_lost(session) == 2
        waited_s = tallies.oldest_wait_s(session, now(session))
    assert set(states) == {status.value for status in Status}
    assert (states["queued"], states["succeeded"], states["failed"]) == (1, 1, 1)
    assert ended == {("succeeded", "sla_met"): 1, ("failed", "none"): 1}
    assert 90 <= waited_s < 150


@pytest.mark.usefixtures("rows")
def test_times_are_cumulative() -> None:
    with reading() as session:
        waits = tallies.waits(session, (1.0, 5.0, 60.0))
        runs = tallies.runs(session, (60.0, 3600.0))
    assert (waits.at_most, waits.total) == ((0, 1, 2), 2)
    assert waits.sum_s == pytest.approx(44, abs=0.01)
    assert (runs.at_most, runs.total) == ((1, 2), 2)
    assert runs.sum_s == pytest.approx(220, abs=0.01)


def test_nothing_is_there_at_first() -> None:
    with reading() as session:
        assert tallies.waits(session, (1.0,)) == ((0,), 0, 0.0)
        assert tallies.oldest_wait_s(session, now(session)) == 0
        assert tallies.attempts_lost(session) == 0
        assert tallies.finished(session) == []


def test_every_metric_of_the_contract_is_there(client: TestClient) -> None:
    """With its labels, and with no others than those that say what a worker left."""
    client.get("/livez")
    text = client.get("/metrics").text
    told = {f.name: f for f in text_string_to_metric_families(text)}
    assert set(told) >= {f"precision_{name}" for name in CONTRACT}
    for name in ("http_request_duration_seconds", "build_info"):
        (labels, *_) = [set(s.labels) for s in told[f"precision_{name}"].samples]
        assert labels - {"le"} == CONTRACT[name]


@pytest.mark.usefixtures("rows")
def test_prometheus_reads_it() -> None:
    text = Metrics(lambda: 7).render().decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    assert found["precision_jobs_finished"].type == "counter"
    waits = found["precision_job_queue_wait_seconds"]
    bounds = [s.labels["le"] for s in waits.samples if s.name.endswith("_bucket")]
    assert bounds == [*map(str, WAIT_BUCKETS_S), "+Inf"]
    runs = {s.name: s.value for s in found["precision_job_run_seconds"].samples}
    assert runs["precision_job_run_seconds_count"] == 2
    assert len(RUN_BUCKETS_S) == 8
    (depth,) = found["precision_queue_depth"].samples
    assert (depth.labels, depth.value) == ({"queue": "celery", "hardware": "h100"}, 1)
    assert found["precision_sse_streams"].samples[0].value == 7
    assert found["precision_queue_oldest_seconds"].samples[0].value >= 90
    assert found["precision_lease_lost"].samples[0].value == 2
