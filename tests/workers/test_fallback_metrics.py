from collections import Counter

from prometheus_client import CollectorRegistry, generate_latest

from optimizer.fallback import Fallbacks
from optimizer.overflow import Cause
from optimizer.stack import Site
from workers.fallback_metrics import FallbackCollector


def test_prometheus_reads_what_fell_back_and_where() -> None:
    counts = Fallbacks()
    registry = CollectorRegistry()
    registry.register(FallbackCollector(counts))
    counts.batches, counts.tokens = 3, 96
    counts.overflowed_tokens, counts.promoted_batches, counts.promoted_tokens = 5, 1, 32
    site = Site.parse("layers.3.ffn_out")
    counts.by_site = Counter({(site, Cause.SATURATED): 5})
    lines = generate_latest(registry).decode().splitlines()
    for line in (
        "precision_fallback_batches_total 3.0",
        "precision_fallback_tokens_total 96.0",
        "precision_fallback_overflowed_tokens_total 5.0",
        "precision_fallback_promoted_batches_total 1.0",
        "precision_fallback_promoted_tokens_total 32.0",
        'precision_fallback_site_tokens_total{cause="saturated",site="layers.3.ffn_out"} 5.0',
    ):
        assert line in lines
