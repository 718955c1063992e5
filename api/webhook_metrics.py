"""What Prometheus reads about webhooks, from the rows that the postmen write.

Nobody scrapes a worker, so this process counts what ended since it looked last. Every
replica counts the same: take the largest, not the sum.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta
from threading import Lock

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy.orm import Session

from api import db, outbox
from api.base import now as started_now
from api.transitions import now

BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SETTLED = timedelta(seconds=5)  # what ended later may not be committed yet


class Webhooks(Collector):
    """Gauges of what waits, and counts of what ended."""

    def __init__(self, registry: CollectorRegistry) -> None:
        registry.register(self)  # first: it counts what the others then say
        self._ended = Counter(
            "precision_webhook_deliveries",
            "Webhooks that arrived or were given up, the same from every replica.",
            ["result"],
            registry=registry,
        )
        self._took = Histogram(
            "precision_webhook_delivery_seconds",
            "Time that the last attempt of a webhook took.",
            buckets=BUCKETS_S,
            registry=registry,
        )
        self._seen_until = started_now() - SETTLED
        self._lock = Lock()

    def collect(self) -> Iterator[Metric]:
        """Look at the rows; called at each scrape."""
        with db.reading() as session:
            at = now(session)
            waiting = outbox.waiting(session, at)
            self._count(session, at - SETTLED)
        yield GaugeMetricFamily(
            "precision_outbox_unpublished",
            "Webhooks that are due and not delivered.",
            value=waiting.letters,
        )
        yield GaugeMetricFamily(
            "precision_outbox_lag_seconds",
            "How long the webhook that waits longest has been due.",
            value=waiting.oldest_s,
        )

    def describe(self) -> Iterator[Metric]:
        """Name nothing: registering must not read the database."""
        return iter(())

    def _count(self, session: Session, until: datetime) -> None:
        with self._lock:
            if until <= self._seen_until:
                return
            for state, log in outbox.ended_between(session, self._seen_until, until):
                self._ended.labels(state.value).inc()
                if log:
                    self._took.observe(log[-1]["duration_s"])
            self._seen_until = until
