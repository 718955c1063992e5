"""What Prometheus reads. One registry per application, no ids in labels."""

from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from sqlalchemy.orm import Session

from api import db, queue, tallies, watched
from api.tallies import Times
from api.transitions import now
from api.webhook_metrics import Webhooks

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
WAIT_BUCKETS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 86_400.0)
RUN_BUCKETS_S = (10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 86_400.0)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})


def service_version() -> str:
    """Return the version that is installed."""
    try:
        return version("precision")
    except PackageNotFoundError:  # run from a checkout that is only on the path
        return "unknown"


class _Jobs(Collector):
    """Counts rows when asked, so that every replica says the same."""

    def collect(self) -> Iterator[Metric]:
        with db.reading() as session:
            yield from _counted(session)
            yield from _watched(session)
            yield _timed(
                "precision_job_queue_wait_seconds",
                "Time from a job's request to its first worker.",
                tallies.waits(session, WAIT_BUCKETS_S),
                WAIT_BUCKETS_S,
            )
            yield _timed(
                "precision_job_run_seconds",
                "Time from a job's first worker to its end.",
                tallies.runs(session, RUN_BUCKETS_S),
                RUN_BUCKETS_S,
            )

    def describe(self) -> Iterator[Metric]:
        return iter(())  # registering must not read the database


def _counted(session: Session) -> Iterator[Metric]:
    states = GaugeMetricFamily(
        "precision_jobs", "Jobs in the database by status.", labels=["status"]
    )
    for status, count in tallies.by_status(session).items():
        states.add_metric([status], count)
    yield states
    ended = CounterMetricFamily(
        "precision_jobs_finished",
        "Jobs that ended, by how they did.",
        labels=["status", "outcome", "hardware"],
    )
    for row in tallies.finished(session):
        ended.add_metric([row.status, row.outcome, row.hardware], row.total)
    yield ended
    depth = GaugeMetricFamily(
        "precision_queue_depth",
        "Jobs that wait, by device, and where a bell rings for them.",
        labels=["queue", "hardware"],
    )
    for hardware, count in tallies.queued(session).items():
        depth.add_metric([queue.name(hardware), hardware], count)
    yield depth
    waited_s = tallies.oldest_wait_s(session, now(session))
    yield GaugeMetricFamily(
        "precision_queue_oldest_seconds",
        "How long the job that waits longest has been waiting.",
        value=waited_s,
    )
    yield CounterMetricFamily(
        "precision_lease_lost",
        "Attempts that ended because a worker fell silent.",
        value=tallies.attempts_lost(session),
    )


def _watched(session: Session) -> Iterator[Metric]:
    """What workers left: they are scraped by nobody."""
    tried = CounterMetricFamily(
        "precision_trials",
        "Measurements that workers made or could not make, by what was tried.",
        labels=["result", "precision"],
    )
    for labels, count in watched.counted(session).items():
        tried.add_metric(labels, count)
    yield tried
    yield _timed(
        "precision_trial_seconds",
        "Time that a measurement took a worker.",
        watched.times(session, watched.BOUNDS_S),
        watched.BOUNDS_S,
    )
    used = GaugeMetricFamily(
        "precision_gpu_memory_used_bytes",
        "Memory in use on a worker's GPU, by whomever.",
        labels=["device"],
    )
    for device, used_bytes in watched.gpus(session).items():
        used.add_metric([device], used_bytes)
    yield used


def _timed(
    name: str, said: str, times: Times, bounds_s: tuple[float, ...]
) -> HistogramMetricFamily:
    buckets = [(str(b), n) for b, n in zip(bounds_s, times.at_most, strict=True)]
    buckets.append(("+Inf", times.total))
    return HistogramMetricFamily(name, said, buckets=buckets, sum_value=times.sum_s)


class Metrics:
    """The metrics of one application."""

    def __init__(self, open_streams: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Jobs())
        Webhooks(self.registry)
        self._created = Counter(
            "precision_jobs_created",
            "Jobs accepted by this process.",
            ["task", "hardware"],
            registry=self.registry,
        )
        self._requests = Histogram(
            "precision_http_request_duration_seconds",
            "Time to answer a request.",
            ["route", "method", "status"],
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        streams = Gauge(
            "precision_sse_streams",
            "Event streams that this process holds open.",
            registry=self.registry,
        )
        streams.set_function(open_streams)
        build = Gauge(
            "precision_build_info",
            "1, labelled with the version.",
            ["version"],
            registry=self.registry,
        )
        build.labels(service_version()).set(1)

    def note_request(
        self, route: str, method: str, status: int, seconds: float
    ) -> None:
        """Count a request. `route` is the template, never the path itself."""
        method = method if method in METHODS else "other"
        self._requests.labels(route, method, str(status)).observe(seconds)

    def note_job(self, task: str, hardware: str) -> None:
        """Count a job that was accepted."""
        self._created.labels(task, hardware).inc()

    def render(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return generate_latest(self.registry)
