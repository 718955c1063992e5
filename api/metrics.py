"""What Prometheus reads. One registry per application, no ids in labels."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from api import db, jobs

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})


def service_version() -> str:
    """Return the version that is installed."""
    try:
        return version("precision")
    except PackageNotFoundError:  # run from a checkout that is only on the path
        return "unknown"


class _JobsByStatus(Collector):
    """Counts rows when asked, so that every replica says the same."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        gauge = GaugeMetricFamily(
            "precision_jobs", "Jobs in the database by status.", labels=["status"]
        )
        with db.reading() as session:
            for status, count in jobs.counts(session).items():
                gauge.add_metric([status], count)
        yield gauge

    def describe(self) -> Iterator[GaugeMetricFamily]:
        return iter(())  # registering must not read the database


class Metrics:
    """The metrics of one application."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_JobsByStatus())
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
