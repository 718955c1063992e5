"""How far a percentile of latency lies from the median: stated, not modelled.

Modelled seconds are of kernels, one after another: a median. A server that is asked for
one request at a time still takes longer now and then (its host, clocks, sampling), and
of that no table knows. The spread is log-normal, through the 99th percentile of a
published run; under load, with requests that wait for one another, it is wider.
"""

from statistics import NormalDist

# Over the median, one request at a time: 1.93 of 1.51 ms between tokens, 24.81 of
# 20.89 ms to the first (SGLang's cookbook, DeepSeek-OCR, `bench_serving`,
# radixarkai.mintlify.app/docs/cookbook/autoregressive/DeepSeek/DeepSeek-OCR). A run of
# vLLM (forums.developer.nvidia.com/t/6x-spark-setup/354399) has 55.00 of 51.75 ms: less.
P99_PER_TOKEN = 1.93 / 1.51
P99_FIRST_TOKEN = 24.81 / 20.89


def over_median(percentile: float, p99: float) -> float:
    """Return a percentile over the median, where the 99th is `p99` times it.

    `percentile` is a share, over 0 and under 1. Example: the median itself is 1, the
    90th of a spread of 1.28 is 1.28^(1.2816 / 2.3263) = 1.15.
    """
    normal = NormalDist()
    return float(p99 ** (normal.inv_cdf(percentile) / normal.inv_cdf(0.99)))
