"""The fast sweep against the exact one, and an emulated FP8 matmul against fp32's.

    python -m tests.bench.sweep                 # everything; the exact sweep takes long
    python -m tests.bench.sweep --layers 0,14,29

Both sweeps score every site × choice on the same tokens of the demo model.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress
from scipy.stats import pearsonr, spearmanr

from optimizer import model, sensitivity, tokens
from optimizer.calibrate import amaxes, calibrate
from optimizer.execute import Reference, WeightCodes
from optimizer.formats import BF16, E4M3
from optimizer.matmul import MATMUL_PRECISION, linear_fp8
from optimizer.model import LoadedModel
from optimizer.quantize import (
    amax,
    quantize,
    scale_from_amax,
)
from optimizer.sensitivity import Candidates
from optimizer.stack import CHOICES, Choice, Granularity, Site
from workers import demo

SIDE = 2048
REPEATS = 5


def main() -> None:
    arguments = parse()
    torch.set_num_threads(os.cpu_count() or 1)
    folder = demo.demo_model(arguments.data_dir)
    loaded = model.load(folder)
    read = tokens.read(
        folder,
        arguments.distribution,
        None,
        calibration_tokens=arguments.tokens,
        validation_tokens=arguments.sequence,
        sequence_tokens=arguments.sequence,
    )
    figures = {
        **agreement(loaded, read.calibration.sequences, arguments.layers),
        **matmul(),
    }
    print(json.dumps(figures))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--distribution", default="web_text")
    parser.add_argument("--data-dir", type=Path, default=Path("var"))
    parser.add_argument(
        "--layers",
        type=lambda text: [int(i) for i in text.split(",")],
        help="only these layers, and the sites that exist once",
    )
    return parser.parse_args()


def agreement(
    loaded: LoadedModel, sequences: Sequence[torch.Tensor], layers: list[int] | None
) -> dict[str, float]:
    count = sum(ids.numel() for ids in sequences)
    forward_s = seconds(lambda: reference(loaded, sequences))
    largest = amaxes(calibrate(loaded, sequences))
    weights = WeightCodes(loaded)
    wanted = candidates(loaded, layers)
    losses: dict[tuple[Site, Choice], sensitivity.Sensitivity] = {}

    def fast() -> None:
        losses.update(sensitivity.measure(loaded, sequences, wanted, largest, weights))

    fast_s = seconds(fast)
    start = time.perf_counter()
    with Progress() as bar:
        task = bar.add_task("exact", total=None)
        exact = sensitivity.exact(
            loaded,
            sequences,
            wanted,
            largest,
            weights,
            lambda done, planned: bar.update(task, completed=done, total=planned),
        )
    exact_s = time.perf_counter() - start
    pairs = [k for k, v in exact.items() if v > 0]
    table(pairs, exact, losses)
    truth = np.array([exact[k] for k in pairs])
    estimate = np.array([losses[k].kl_nats for k in pairs])
    return {
        "tokens": count,
        "pairs": len(pairs),
        "log_pearson": float(pearsonr(np.log(truth), np.log(estimate)).statistic),
        "spearman": float(spearmanr(truth, estimate).statistic),
        "median_ratio": float(np.median(estimate / truth)),
        "forward_s": forward_s,
        "fast_sweep_s": fast_s,
        "exact_sweep_s": exact_s,
        "exact_over_fast_time_ratio": exact_s / fast_s,
        "fast_sweep_forward_passes": fast_s / forward_s,
    }


@torch.no_grad()
def reference(loaded: LoadedModel, sequences: Sequence[torch.Tensor]) -> None:
    for ids in sequences:
        loaded.forward(ids, Reference())


def candidates(loaded: LoadedModel, layers: list[int] | None) -> Candidates:
    """Every choice but fp16, which is a candidate only where bf16 is missing."""
    return {
        site: [c for c in CHOICES[site.component] if c.name != "fp16"]
        for site in loaded.sites
        if layers is None or site.layer < 0 or site.layer in layers
    }


def table(
    pairs: Sequence[tuple[Site, Choice]],
    exact: dict[tuple[Site, Choice], float],
    losses: dict[tuple[Site, Choice], sensitivity.Sensitivity],
) -> None:
    """Print the median of estimate / exact, and the totals, by component and choice."""
    rows: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for site, choice in pairs:
        both = exact[site, choice], losses[site, choice].kl_nats
        rows.setdefault((str(site.component), choice.name), []).append(both)
    print(f"{'component':13} {'choice':21} {'exact nats':>10} {'fast nats':>10}  ratio")
    for (component, choice_name), both_of in rows.items():
        exact_sum, fast_sum = (sum(column) for column in zip(*both_of, strict=True))
        ratio = statistics.median(f / e for e, f in both_of)
        print(
            f"{component:13} {choice_name:21} {exact_sum:10.3g} {fast_sum:10.3g}"
            f" {ratio:6.2f}"
        )


def matmul() -> dict[str, float | str]:
    """Time an emulated FP8 matmul, its weight quantized before, beside fp32's."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SIDE, SIDE, generator=generator)
    w = torch.randn(SIDE, SIDE, generator=generator)
    x_scale = scale_from_amax(amax(x, Granularity.TENSOR), E4M3)
    w_scale = scale_from_amax(amax(w, Granularity.TENSOR), E4M3)
    codes = quantize(w, w_scale, E4M3)
    ours, fp32 = [], []
    for _ in range(REPEATS):  # interleaved: noise of the machine falls on both
        fp32.append(seconds(lambda: torch.nn.functional.linear(x, w)))
        ours.append(seconds(lambda: linear_fp8(x, codes, w_scale, x_scale, E4M3, BF16)))
    return {
        "matmul_side": SIDE,
        "matmul_units": MATMUL_PRECISION,
        "emulated_fp8_ms": 1e3 * statistics.median(ours),
        "fp32_ms": 1e3 * statistics.median(fp32),
        "emulated_over_fp32_time_ratio": statistics.median(ours)
        / statistics.median(fp32),
    }


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
