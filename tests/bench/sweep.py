"""The fast sweep against the exact one, and what it predicts of whole stacks.

    python -m tests.bench.sweep                 # everything; the exact sweep takes long
    python -m tests.bench.sweep --layers 0,14,29 --tokens 4096

Both sweeps score every site × choice on the same tokens of the demo model; with
`--layers` the exact one does these layers only. Then stacks of the front are measured
on held-out tokens: some correct the prediction, others, unseen, check it. At the end
an emulated FP8 matmul is timed beside fp32's.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress
from scipy.stats import pearsonr, spearmanr

from optimizer import hardware, model, sensitivity, tokens
from optimizer.calibrate import amaxes, calibrate
from optimizer.choose import Chooser, allowed, modelled, tabulate
from optimizer.exact import exact
from optimizer.execute import Amaxes, Reference, WeightCodes
from optimizer.formats import BF16, E4M3
from optimizer.matmul import MATMUL_PRECISION, linear_fp8
from optimizer.model import LoadedModel
from optimizer.quantize import (
    amax,
    quantize,
    scale_from_amax,
)
from optimizer.repair import repair
from optimizer.spec import OptimizeSpec
from optimizer.stack import CHOICES, Choice, Granularity, Site, Stack
from optimizer.sums import Candidates, Sensitivity
from optimizer.swept import CORE, family
from optimizer.tokens import Tokens
from optimizer.validate import Truth, quality, run_stack
from workers import demo

SIDE = 2048
REPEATS = 5
DEVICE = "l4"
BUDGET, PER_ROUND, CHECKS = 12, 6, 6


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
        validation_tokens=arguments.held_out,
        sequence_tokens=arguments.sequence,
    )
    every = candidates(loaded, None)
    largest = amaxes(calibrate(loaded, read.calibration.sequences))
    scored = Scored(loaded, read, largest, WeightCodes(loaded), {})
    figures = {
        **speed(scored, every),
        **agreement(scored, candidates(loaded, arguments.layers)),
        **front(scored),
        **matmul(),
    }
    print(json.dumps(figures))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--held-out", type=int, default=2048)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--distribution", default="web_text")
    parser.add_argument("--data-dir", type=Path, default=Path("var"))
    parser.add_argument(
        "--layers",
        type=lambda text: [int(i) for i in text.split(",")],
        help="only these layers, and the sites that exist once",
    )
    return parser.parse_args()


@dataclass(frozen=True)
class Scored:
    """The model, its data, and what the fast sweep said of every pair."""

    loaded: LoadedModel
    read: Tokens
    largest: Amaxes
    weights: WeightCodes
    losses: dict[tuple[Site, Choice], Sensitivity]


def speed(scored: Scored, every: Candidates) -> dict[str, float]:
    """Sweep everything, and compare its time with a forward pass of the reference."""
    sequences = scored.read.calibration.sequences
    forward_s = seconds(lambda: reference(scored.loaded, sequences))
    rest = scored.loaded, sequences, every, scored.largest, scored.weights
    fast_s = seconds(lambda: scored.losses.update(sensitivity.measure(*rest)))
    return {
        "tokens": sum(ids.numel() for ids in sequences),
        "forward_s": forward_s,
        "fast_sweep_s": fast_s,
        "fast_sweep_pairs": len(scored.losses),
        "fast_sweep_forward_passes": fast_s / forward_s,
    }


def agreement(scored: Scored, wanted: Candidates) -> dict[str, float]:
    start = time.perf_counter()
    with Progress() as bar:
        task = bar.add_task("exact", total=None)
        found = exact(
            scored.loaded,
            scored.read.calibration.sequences,
            wanted,
            scored.largest,
            scored.weights,
            lambda done, planned: bar.update(task, completed=done, total=planned),
        )
    exact_s = time.perf_counter() - start
    losses = scored.losses
    pairs = [k for k, v in found.items() if v > 0]
    table(pairs, found, losses)
    truth = np.array([found[k] for k in pairs])
    estimate = np.array([losses[k].kl_nats for k in pairs])
    error = np.array([losses[k].kl_nats_se for k in pairs])
    return {
        "exact_pairs": len(pairs),
        "log_pearson": float(pearsonr(np.log(truth), np.log(estimate)).statistic),
        "spearman": float(spearmanr(truth, estimate).statistic),
        "median_ratio": float(np.median(estimate / truth)),
        "within_two_standard_errors_share": float(
            np.mean(np.abs(estimate - truth) <= 2 * error)
        ),
        "exact_sweep_s": exact_s,
    }


def front(scored: Scored) -> dict[str, float]:
    """Measure stacks of a front that the correction has not seen."""
    target = hardware.device(DEVICE)
    shape = scored.loaded.shape
    spec = OptimizeSpec(model="", model_path="", model_sha256="", hardware=DEVICE)
    verdicts = allowed(shape, target, spec, {})
    usable = {
        s: {
            c: no or (None if (s, c) in scored.losses else "not swept")
            for c, no in some.items()
        }
        for s, some in verdicts.items()
    }
    cost = modelled(shape, target, spec.workload)
    rows = tabulate(shape, usable, scored.losses, cost)
    plain = Chooser(shape, rows, target.memory_bytes)
    truth = Truth.of(scored.loaded, scored.read.validation.sequences)

    def measure(stacks: Sequence[Stack]) -> list[tuple[float, float, float]]:
        rest = scored.largest, scored.weights
        every = [run_stack(scored.loaded, truth, s, *rest) for s in stacks]
        kl = [quality(values, 0).kl_nats for values in every]
        return [(one.value, one.low, one.high) for one in kl]

    state = repair(plain, measure, budget=BUDGET, per_round=PER_ROUND)
    unseen = [s for s in state.chooser.front() if state.known(s) is None]
    lossy = [s for s in unseen if state.chooser.totals(s).kl_nats > 0]
    checked = lossy[:: max(1, len(lossy) // CHECKS)][:CHECKS]
    print(
        f"{'measured':>10} {'predicted':>10} {'added up':>10}  ratio  in the interval"
    )
    ratios, within = [], []
    for stack, (kl, low, high) in zip(checked, measure(checked), strict=True):
        predicted = state.chooser.totals(stack).kl_nats
        added = plain.totals(stack).kl_nats
        ratios.append(predicted / kl)
        within.append(low <= predicted <= high)
        print(
            f"{kl:10.3g} {predicted:10.3g} {added:10.3g} {ratios[-1]:6.2f}  {within[-1]}"
        )
    return {
        "front_stacks_learned_from": len(state.measured),
        "front_stacks_checked": len(checked),
        "front_prediction_error_max": max(abs(r - 1) for r in ratios),
        "front_prediction_error_median": statistics.median(abs(r - 1) for r in ratios),
        "front_within_interval_share": sum(within) / len(within),
    }


@torch.no_grad()
def reference(loaded: LoadedModel, sequences: Sequence[torch.Tensor]) -> None:
    for ids in sequences:
        loaded.forward(ids, Reference())


def candidates(loaded: LoadedModel, layers: list[int] | None) -> Candidates:
    """Every choice that each job sweeps."""
    return {
        site: [c for c in CHOICES[site.component] if family(c) == CORE]
        for site in loaded.sites
        if layers is None or site.layer < 0 or site.layer in layers
    }


def table(
    pairs: Sequence[tuple[Site, Choice]],
    exact: dict[tuple[Site, Choice], float],
    losses: dict[tuple[Site, Choice], Sensitivity],
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
