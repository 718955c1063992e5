"""Rounding that compensates beside rounding to nearest, on held-out tokens.

    python -m tests.bench.compensate
    python -m tests.bench.compensate --tokens 8192 --held-out 4096

All matrices of the demo model but lm_head in e4m3, under each choice that is named. KL
is in nats per token, with block bootstrap intervals; the difference from rounding to
nearest is paired. "fitted" are scales per channel chosen by `scales`, "fisher" are
Hessians weighed by gradients.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from optimizer import model, tokens
from optimizer.calibrate import amaxes, calibrate
from optimizer.compensate import CompensatedCodes, Key, Rounded, compensate
from optimizer.execute import Amaxes, Reference, WeightCodes
from optimizer.formats import E4M3
from optimizer.hessians import FisherHessians, Hessians
from optimizer.magnitudes import Magnitudes
from optimizer.metrics import bootstrap_interval
from optimizer.model import LoadedModel
from optimizer.quantize import scale_from_amax
from optimizer.scales import FittedCodes, input_scale
from optimizer.sites import LinearPart
from optimizer.stack import (
    Choice,
    Component,
    Role,
    Site,
    Stack,
    choice_named,
)
from optimizer.statistics import magnitudes_of
from optimizer.validate import BLOCK_TOKENS, Truth, Values, run_stack
from workers import demo

CHOICES = "fp8_e4m3_weight_only,fp8_e4m3,fp8_e4m3_token"
Made = Mapping[Key, Rounded]


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
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
    calibration = read.calibration.sequences
    largest = amaxes(calibrate(loaded, calibration))
    plain, forward_s = collect(loaded, calibration)
    fisher, fisher_s = weighted(loaded, calibration)
    truth = Truth.of(loaded, read.validation.sequences)
    figures: dict[str, float] = {
        "calibration_tokens": read.calibration.tokens,
        "held_out_tokens": read.validation.tokens,
        "forward_s": forward_s,
        "gradient_pass_s": fisher_s,
    }
    figures |= inputs_clipped(loaded, calibration, largest)
    for name in arguments.choices.split(","):
        choice = choice_named(Component.FFN_IN, name)
        ways = rounded(loaded, choice, plain, fisher, arguments.damping, figures)
        figures |= compare(loaded, truth, choice, largest, ways)
    print(json.dumps(figures))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--held-out", type=int, default=2048)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--choices", default=CHOICES)
    parser.add_argument("--distribution", default="web_text")
    parser.add_argument("--damping", type=float, help="default: by tokens")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--data-dir", type=Path, default=Path("var"))
    return parser.parse_args()


# Calibration


@torch.no_grad()
def collect(
    loaded: LoadedModel, sequences: Sequence[torch.Tensor]
) -> tuple[Hessians, float]:
    """Return the Hessians, and the seconds of a reference pass without them."""
    forward_s = seconds(lambda: [loaded.forward(s, Reference()) for s in sequences])
    hessians = Hessians(inside(loaded))
    for ids in sequences:
        loaded.forward(ids, hessians)
    return hessians, forward_s


def weighted(
    loaded: LoadedModel, sequences: Sequence[torch.Tensor]
) -> tuple[FisherHessians, float]:
    """Return the Hessians weighted by gradients, and the seconds that they took."""
    hessians = FisherHessians(inside(loaded))
    generator = torch.Generator().manual_seed(0)
    took = seconds(lambda: [hessians.run(loaded, s, generator) for s in sequences])
    return hessians, took


def inside(loaded: LoadedModel) -> list[Site]:
    """Every site with matrices but lm_head."""
    return [site for site in loaded.parts if site.layer >= 0]


class Histograms(Reference):
    """Every input of every matrix, counted by magnitude."""

    def __init__(self) -> None:
        self.by_site: dict[Site, Magnitudes] = {}

    def linear(self, part: LinearPart, x: torch.Tensor) -> torch.Tensor:
        found = magnitudes_of(x)
        self.by_site[part.site] = self.by_site.get(part.site, Magnitudes()).merge(found)
        return super().linear(part, x)


@torch.no_grad()
def inputs_clipped(
    loaded: LoadedModel, sequences: Sequence[torch.Tensor], largest: Amaxes
) -> dict[str, float]:
    """Return for how many inputs a static scale below amax / max lowers the error."""
    histograms = Histograms()
    for ids in sequences[:2]:
        loaded.forward(ids, histograms)
    clipped = [
        input_scale(
            histograms.by_site[site],
            scale_from_amax(largest[site, Role.INPUT], E4M3),
            E4M3,
        )
        for site in inside(loaded)
    ]
    count = sum(float(c.ratio) < 1 for c in clipped)
    print(f"inputs: clipping lowers the error of {count} of {len(clipped)}")
    return {"inputs_clipped": count, "inputs": len(clipped)}


# Rounding


def rounded(
    loaded: LoadedModel,
    choice: Choice,
    plain: Hessians,
    fisher: Hessians,
    damping: float | None,
    figures: dict[str, float],
) -> dict[str, WeightCodes]:
    """Return the matrices, rounded in every way. The first is to nearest."""
    nearest, fitted = WeightCodes(loaded), FittedCodes(loaded, fisher)
    ways: dict[str, WeightCodes] = {"nearest": nearest, "fitted": fitted}
    for name, hessians, scales in (
        ("gptq", plain, nearest),
        ("gptq fisher", fisher, nearest),
        ("gptq fisher fitted", fisher, fitted),
    ):
        start = time.perf_counter()
        made = compensated(loaded, choice, hessians, scales, damping)
        figures[f"{choice.name} {name} s"] = time.perf_counter() - start
        left = sum(m.loss for m in made.values())
        whole = sum(m.nearest_loss for m in made.values())
        figures[f"{choice.name} {name} calibration_loss_ratio"] = left / whole
        ways[name] = CompensatedCodes(loaded, made)
    gains = [found.gain for found in fitted.found.values()]
    figures[f"{choice.name} fitted_mean_gain"] = float(np.mean(gains)) if gains else 0.0
    return ways


def compensated(
    loaded: LoadedModel,
    choice: Choice,
    hessians: Hessians,
    scales: WeightCodes,
    damping: float | None,
) -> dict[Key, Rounded]:
    assert choice.weight is not None
    made: dict[Key, Rounded] = {}
    for site in inside(loaded):
        made |= compensate(loaded.parts[site], hessians, choice.weight, scales, damping)
    return made


def compare(
    loaded: LoadedModel,
    truth: Truth,
    choice: Choice,
    largest: Amaxes,
    ways: Mapping[str, WeightCodes],
) -> dict[str, float]:
    """Print KL on the held-out tokens, and the ratio to rounding to nearest."""
    stack = Stack(dict.fromkeys(inside(loaded), choice))
    print(f"\n{choice.name}: KL in nats per token")
    figures, base = {}, None
    for name, weights in ways.items():
        kl = run_stack(loaded, truth, stack, largest, weights).kl
        base = kl if base is None else base
        low, high = interval(kl)
        less, more = interval(kl - base)
        ratio = float(kl.mean() / base.mean())
        print(
            f"{name:18} {kl.mean():.5f} [{low:.5f}, {high:.5f}]  ratio {ratio:.3f}"
            f"  difference [{less:+.5f}, {more:+.5f}]",
            flush=True,
        )
        figures[f"{choice.name} {name} kl_nats"] = float(kl.mean())
        figures[f"{choice.name} {name} ratio"] = ratio
    return figures


def interval(values: Values) -> tuple[float, float]:
    return bootstrap_interval(values, block=BLOCK_TOKENS, samples=1000, seed=0)


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
