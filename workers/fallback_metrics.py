"""What Prometheus reads of a served stack: how much fell back, and where.

The counts are the runner's own and are read when they are asked for. A site is one of
a model's few hundred; there are no ids in labels.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from optimizer.fallback import Fallbacks


class FallbackCollector(Collector):
    """The counts of one runner, for the registry of whoever serves with it."""

    def __init__(self, counts: Fallbacks) -> None:
        self._counts = counts

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield every counter."""
        counts = self._counts
        yield _plain("batches", "Batches served.", counts.batches)
        yield _plain("tokens", "Tokens served, without padding.", counts.tokens)
        yield _plain(
            "overflowed_tokens",
            "Tokens that overflowed FP8, seen before their batch was promoted.",
            counts.overflowed_tokens,
        )
        yield _plain(
            "promoted_batches",
            "Batches that ran again in 16 bits as a whole.",
            counts.promoted_batches,
        )
        yield _plain(
            "promoted_tokens", "Tokens of promoted batches.", counts.promoted_tokens
        )
        by_site = CounterMetricFamily(
            "precision_fallback_site_tokens",
            "Tokens that overflowed at a site.",
            labels=["site", "cause"],
        )
        for (site, cause), tokens in sorted(counts.by_site.items()):
            by_site.add_metric([str(site), str(cause)], tokens)
        yield by_site


def _plain(name: str, meaning: str, value: int) -> CounterMetricFamily:
    return CounterMetricFamily(f"precision_fallback_{name}", meaning, value=value)
