"""How long a front takes, and how exact it is: `python -m tests.bench.search`.

Sites with made-up but typical prices: losses over four decades that halve with every
bit, seconds and bytes that follow the bits. `by_price` is the product's way, prices and
a core; `all_at_once` hands every question to branch and bound as it is. CPU seconds of
this process, so that other work on the machine counts for little. The last line is
JSON.
"""

import argparse
import json
import time

import numpy as np

from optimizer.search import Edge, Edges, Front, Groups, Option, front
from optimizer.stack import Component, choice_named

BITS = (4, 6, 8, 8, 8, 16, 16, 32)
ANY = choice_named(Component.FFN_IN, "bf16")
WIDE = 10**9  # more options than there are: everything goes to branch and bound


def sites(count: int, choices: int, seed: int = 0) -> Groups:
    rng = np.random.default_rng(seed)

    def site() -> list[Option]:
        kl, seconds, size = 10 ** rng.uniform([-7, -5.5, 5], [-3, -4, 8])
        return [
            Option(
                ANY,
                float(kl * 2.0 ** (8 - bits) * rng.lognormal(0, 0.7)),
                float(seconds * bits / 16 * rng.lognormal(0, 0.3)),
                float(seconds * bits),
                int(size * bits / 8 * rng.lognormal(0, 0.02)),
            )
            for bits in rng.choice(BITS, choices)
        ]

    return [site() for _ in range(count)]


def casts(groups: Groups, seed: int = 0) -> Edges:
    """Tie runs of five sites together, as a layer does."""
    rng = np.random.default_rng(seed)
    edges = []
    for i in range(len(groups) - 1):
        if i % 5 != 4:
            shape = (len(groups[i]), len(groups[i + 1]))
            seconds = rng.choice([0.0, 2e-6, -1e-6], shape)
            edges.append(Edge(i, i + 1, seconds, 10 * seconds))
    return edges


def timed(groups: Groups, **options: object) -> tuple[Front, float]:
    start = time.process_time()
    found = front(groups, **options)  # type: ignore[arg-type]
    return found, time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--points", type=int, default=24)
    points = parser.parse_args().points
    small, large = sites(272, 6), sites(1000, 12)
    figures: dict[str, float] = {}
    print(f"{'':34}{'points':>7}{'CPU s':>8}{'epsilon':>10}")
    for name, groups, edges, width in (
        ("272x6_by_price", small, (), None),
        ("272x6_all_at_once", small, (), WIDE),
        ("1000x12_by_price", large, (), None),
        ("1000x12_casts_by_price", large, casts(large), None),
    ):
        options = {} if width is None else {"small": width}
        found, seconds = timed(groups, points=points, edges=edges, **options)
        print(f"{name:34}{len(found.picks):7}{seconds:8.2f}{found.epsilon:10.2g}")
        figures[f"{name}_s"] = round(seconds, 2)
        figures[f"{name}_epsilon"] = found.epsilon
    ratio = figures["272x6_all_at_once_s"] / figures["272x6_by_price_s"]
    figures["all_at_once_over_by_price_ratio"] = round(ratio, 2)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
