"""Rounding that compensates beside rounding to nearest, on held-out tokens.

    python -m tests.bench.compensate
    python -m tests.bench.compensate --tokens 8192 --held-out 4096

All matrices of the demo model but lm_head in e4m3, under each choice that is named. KL
is in nats per token, with block bootstrap intervals; the difference from rounding to
nearest is paired. "fitted" are scales per channel chosen by `scales`, "fisher" are
Hessians weighed by gradients, "static" are the inputs' scales chosen by
`static_scales`, and "recode" is what a job does that asks for compensation.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from optimizer.calibrate import amaxes, calibrate
from optimizer.compensate import CompensatedCodes, Key, Rounded, compensate
from optimizer.execute import Amaxes, Reference, WeightCodes
from optimizer.hessians import FisherHessians, Hessians
from optimizer.metrics import bootstrap_interval
from optimizer.model import LoadedModel
from optimizer.recode import Gain, recode
from optimizer.scales import FittedCodes
from optimizer.stack import (
    Choice,
    Component,
    Granularity,
    Site,
    Stack,
    choice_named,
)
from optimizer.validate import BLOCK_TOKENS, Truth, Values, run_stack
from tests.bench._inputs import inputs, options

CHOICES = "fp8_e4m3_weight_only,fp8_e4m3,fp8_e4m3_token"


def main() -> None:
    arguments = parse()
    loaded, read = inputs(arguments)
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
    for name in arguments.choices.split(","):
        choice = choice_named(Component.FFN_IN, name)
        made = rounded(loaded, choice, plain, fisher, arguments.damping, figures)
        ways = {name: (weights, largest) for name, weights in made.items()}
        if choice.input == choice.weight:  # per tensor: the inputs' scales are static
            start = time.perf_counter()
            stack = stack_of(loaded, choice)
            found = recode(loaded, calibration, stack, amaxes=largest)
            figures[f"{choice.name} recode s"] = time.perf_counter() - start
            figures |= changed(found.gain)
            ways["static"] = made["nearest"], found.amaxes
            ways["recode"] = found.weights, found.amaxes
        figures |= compare(loaded, truth, choice, ways)
    print(json.dumps(figures))


def parse() -> argparse.Namespace:
    parser = options(__doc__.split("\n")[0])
    parser.add_argument("--choices", default=CHOICES)
    parser.add_argument("--damping", type=float, help="default: by tokens")
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


# Rounding


def stack_of(loaded: LoadedModel, choice: Choice) -> Stack:
    """Every matrix but lm_head under one choice."""
    return Stack(dict.fromkeys(inside(loaded), choice))


def changed(gain: Gain) -> dict[str, float]:
    """Return how many static scales are not amax's, and how many of them clip."""
    ratios = gain.static_scales.values()
    return {"static_scales": len(ratios), "clipped": sum(r < 1 for r in ratios)}


def rounded(
    loaded: LoadedModel,
    choice: Choice,
    plain: Hessians,
    fisher: Hessians,
    damping: float | None,
    figures: dict[str, float],
) -> dict[str, WeightCodes]:
    """Return the matrices, rounded in every way. The first is to nearest."""
    assert choice.weight is not None
    nearest, fitted = WeightCodes(loaded), FittedCodes(loaded, fisher)
    ways: dict[str, WeightCodes] = {"nearest": nearest}
    tried: list[tuple[str, Hessians, WeightCodes]] = [
        ("gptq", plain, nearest),
        ("gptq fisher", fisher, nearest),
    ]
    if choice.weight.granularity is Granularity.CHANNEL:  # no other scales are fitted
        ways["fitted"] = fitted
        tried.append(("gptq fisher fitted", fisher, fitted))
    for name, hessians, scales in tried:
        start = time.perf_counter()
        made = compensated(loaded, choice, hessians, scales, damping)
        figures[f"{choice.name} {name} s"] = time.perf_counter() - start
        left = sum(m.loss for m in made.values())
        whole = sum(m.nearest_loss for m in made.values())
        figures[f"{choice.name} {name} calibration_loss_ratio"] = left / whole
        ways[name] = CompensatedCodes(loaded, made)
    gains = [found.gain for found in fitted.found.values()]
    if gains:
        figures[f"{choice.name} fitted_mean_gain"] = float(np.mean(gains))
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
    ways: Mapping[str, tuple[WeightCodes, Amaxes]],
) -> dict[str, float]:
    """Print KL on the held-out tokens, and the ratio to rounding to nearest."""
    stack = stack_of(loaded, choice)
    print(f"\n{choice.name}: KL in nats per token")
    figures, base = {}, None
    for name, (weights, largest) in ways.items():
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
