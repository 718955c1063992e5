"""Our choice of narrow layers beside that of four other tools, on the same tokens.

    make peers                                 # once: their own virtual environment
    python -m tests.bench.peers                # everything: three draws, the better part of an hour
    python -m tests.bench.peers --draws 1 --skip AIMET,'modelopt kl_div'

Everybody gets the demo model in float32, the same calibration sequences and the same
mean bits of a weight (matrices of the layers, lm_head aside), and says which matrices
get 8 bits. Held-out tokens of other documents are run by one evaluator, ours. The
figures are KL(float32 ‖ stack) in nats per token, averaged over the draws, with block
bootstrap intervals over tokens. Peers' answers are kept in a folder: a run that was
broken off goes on from there.

Table 1, assignment only: per-tensor static e4m3 for weights and inputs, whoever chose.
Table 2, whole product: our granularities, operands and rounding at the same bits of a
weight, beside the same peers' stacks as in table 1. "Weight-only" leaves inputs in
bf16 (decoding with a small batch gains as much), "FP8 inputs" has 8-bit inputs
wherever weights have 8 bits.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from optimizer import model, tokens
from optimizer.calibrate import amaxes, calibrate
from optimizer.execute import Amaxes, Reference, Stacked, WeightCodes
from optimizer.metrics import logits_kl_nats
from optimizer.model import LoadedModel
from optimizer.recode import recode
from optimizer.sensitivity import measure
from optimizer.stack import (
    WHOLE_MODEL,
    Choice,
    Site,
    Stack,
    choice_named,
)
from optimizer.walk import Activations
from tests.bench.peers_tools import matrices
from tests.bench.peers_tools.environment import PEERS, Answer, ask
from tests.bench.peers_tools.tables import (
    APART,
    BASELINES,
    FUSED,
    OURS,
    Key,
    Report,
    Values,
)
from workers import demo

SEQUENCE_TOKENS = 128
BATCH = 8  # sequences that run together: no scale of any stack spans two tokens
NARROW = "fp8_e4m3"  # per tensor, static: what table 1 is about
WIDE = "bf16"
MODES = {"weight-only": "fp8_e4m3_weight_only", "FP8 inputs": "fp8_e4m3_token"}
COMPENSATED = ", compensated"
WHOLE = [f"ours, {mode}{more}" for mode in MODES for more in ("", COMPENSATED)]


@dataclass(slots=True, eq=False)
class Draw:
    """What is decided from one set of calibration sequences."""

    amaxes: Amaxes
    stacks: dict[Key, tuple[Stack, WeightCodes]] = field(default_factory=dict)
    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)  # clock, cpu
    bits: dict[Key, float] = field(default_factory=dict)  # as it came out


@dataclass(slots=True, eq=False)
class Bench:
    """The model, its matrices and what everything is measured on."""

    product: LoadedModel  # as the product sees it, siblings fused
    loaded: LoadedModel  # every matrix a site of its own: runs any assignment
    folder: Path
    sites: dict[str, Site]
    sizes: dict[str, int]
    weights: WeightCodes
    bits: Sequence[float]
    held_out: Sequence[Tensor]


def main() -> None:
    arguments = parse()
    bench = load(arguments)
    calibration = read(arguments).calibration.sequences
    peers = [p for p in PEERS if p.name not in arguments.skip]
    console = Console()
    draws: list[Draw] = []
    kl: list[dict[Key, Values]] = []
    for number in range(arguments.draws):
        first = number * arguments.sequences
        sequences = calibration[first : first + arguments.sequences]
        answers = {}
        for peer in peers:
            if peer.slow and number >= arguments.slow_draws:
                continue
            with console.status(f"draw {number + 1}: {peer.name}"):
                answers[peer.name] = ask(
                    peer, bench.folder, sequences, bench.bits, arguments.kept
                )
        with console.status(f"draw {number + 1}: ours"):
            draws.append(decide(bench, sequences, answers, seed=number))
        kl.append(evaluate(bench, draws[-1], f"draw {number + 1}"))
        report = Report(
            bits=bench.bits,
            peers=[p.name for p in peers],
            whole=WHOLE,
            kl=kl,
            seconds=[draw.seconds for draw in draws],
        )
        so_far = arguments.kept / "figures.json"
        so_far.parent.mkdir(parents=True, exist_ok=True)
        so_far.write_text(json.dumps(report.figures(), indent=1) + "\n")
    report.show(console)
    print(json.dumps(report.figures()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--slow-draws", type=int, default=3, help="of slow peers")
    parser.add_argument("--sequences", type=int, default=8, help="of 128, to calibrate")
    parser.add_argument("--held-out", type=int, default=24, help="sequences of 128")
    parser.add_argument("--distribution", default="web_text")
    parser.add_argument("--data-dir", type=Path, default=Path("var"))
    parser.add_argument("--kept", type=Path, help="where peers' answers are kept")
    parser.add_argument("--bits", type=numbers, default=[9.0, 10.0, 12.0])
    parser.add_argument(
        "--skip", type=lambda text: text.split(","), default=[], help="peers by name"
    )
    arguments = parser.parse_args()
    arguments.kept = arguments.kept or arguments.data_dir / "bench" / "peers"
    return arguments


def numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def read(arguments: argparse.Namespace) -> tokens.Tokens:
    return tokens.read(
        demo.demo_model(arguments.data_dir),
        arguments.distribution,
        None,
        calibration_tokens=arguments.draws * arguments.sequences * SEQUENCE_TOKENS,
        validation_tokens=arguments.held_out * SEQUENCE_TOKENS,
        sequence_tokens=SEQUENCE_TOKENS,
    )


def load(arguments: argparse.Namespace) -> Bench:
    folder = demo.demo_model(arguments.data_dir)
    product, loaded = model.load(folder), model.load(folder)
    sites = matrices.split(loaded)
    return Bench(
        product=product,
        loaded=loaded,
        folder=folder,
        sites=sites,
        sizes=matrices.linear_sites(loaded),
        weights=WeightCodes(loaded),
        bits=arguments.bits,
        held_out=read(arguments).validation.sequences,
    )


# --- who decides what ----------------------------------------------------------


def decide(
    bench: Bench, sequences: Sequence[Tensor], answers: Mapping[str, Answer], seed: int
) -> Draw:
    """Turn everybody's choice into stacks of the same evaluator."""
    start = now()
    fused = sensitivities(bench.product, sequences, [NARROW], seed)[NARROW]
    least(bench, fused, bench.bits[0])
    seconds, cpu = (a - b for a, b in zip(now(), start, strict=True))
    each = sensitivities(bench.loaded, sequences, [NARROW], seed)[NARROW]
    draw = Draw(amaxes(calibrate(bench.loaded, sequences)))
    draw.seconds[OURS] = seconds, cpu
    for name, answer in answers.items():
        draw.seconds[name] = answer.seconds, answer.cpu_seconds
    for bits in bench.bits:
        for name, answer in answers.items():
            keep(bench, draw, name, bits, answer.narrow[bits])
        keep(bench, draw, FUSED, bits, least(bench, fused, bits))
        keep(bench, draw, APART, bits, least(bench, each, bits))
        ends = matrices.ends_last(bench.sizes, len(bench.loaded.layers), bits)
        some = matrices.at_random(bench.sizes, bits, seed)
        for name, names in zip(BASELINES, (ends, some), strict=True):
            keep(bench, draw, name, bits, names)
    for choice in (WIDE, "fp8_e5m2", NARROW):
        keep(bench, draw, f"everything {choice}", 0.0, list(bench.sizes), choice)
    add_whole(bench, draw, sequences, seed)
    return draw


def add_whole(bench: Bench, draw: Draw, sequences: Sequence[Tensor], seed: int) -> None:
    """Note the stacks of the whole product."""
    compensated = compensated_codes(bench, sequences)
    losses = sensitivities(bench.product, sequences, list(MODES.values()), seed)
    for mode, choice in MODES.items():
        for bits in bench.bits:
            names = least(bench, losses[choice], bits)
            keep(bench, draw, f"ours, {mode}", bits, names, choice)
            stack, _ = draw.stacks[f"ours, {mode}", bits]
            draw.stacks[f"ours, {mode}{COMPENSATED}", bits] = stack, compensated


def least(bench: Bench, losses: Mapping[str, float], bits: float) -> list[str]:
    """Narrow what loses least. `losses` are of sites, by the name of a site's parts."""
    groups = {n: parts for parts in losses for n in parts.split()}
    gains = dict.fromkeys(bench.sizes, 0.0)
    gains |= {parts.split()[0]: loss for parts, loss in losses.items()}
    return matrices.least(gains, bench.sizes, bits, groups)


def keep(
    bench: Bench,
    draw: Draw,
    name: str,
    bits: float,
    narrow: Sequence[str] | frozenset[str],
    choice: str = NARROW,
) -> None:
    """Note a stack that narrows these matrices."""
    narrowed = {
        bench.sites[n]: choice_named(bench.sites[n].component, choice) for n in narrow
    }
    stack = matrices.assign(bench.sites, narrowed, WIDE)
    draw.stacks[name, bits] = stack, bench.weights
    draw.bits[name, bits] = matrices.mean_bits(bench.sizes, narrow)


def compensated_codes(bench: Bench, sequences: Sequence[Tensor]) -> WeightCodes:
    """Return every matrix of `MODES` so rounded that columns make up for earlier ones.

    Both modes have the same weights: e4m3, a scale for each output.
    """
    everything = Stack(
        {
            site: choice_named(site.component, MODES["weight-only"])
            for site in bench.product.parts
            if site.layer != WHOLE_MODEL
        }
    )
    return recode(bench.product, sequences, everything)[0]


def sensitivities(
    loaded: LoadedModel, sequences: Sequence[Tensor], names: Sequence[str], seed: int
) -> dict[str, dict[str, float]]:
    """Return what each choice loses beyond `WIDE`, by the names of a site's parts."""
    kept = Activations()
    largest = amaxes(calibrate(loaded, sequences, kept=kept))
    wanted: dict[Site, list[Choice]] = {
        site: [choice_named(site.component, name) for name in (WIDE, *names)]
        for site in loaded.parts
        if site.layer != WHOLE_MODEL
    }
    losses = measure(
        loaded, sequences, wanted, largest, WeightCodes(loaded), seed=seed, kept=kept
    )

    def loss(site: Site, name: str) -> float:
        return losses[site, choice_named(site.component, name)].kl_nats

    parts = {site: " ".join(p.name for p in loaded.parts[site]) for site in wanted}
    return {
        name: {p: loss(site, name) - loss(site, WIDE) for site, p in parts.items()}
        for name in names
    }


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


@torch.no_grad()
def evaluate(bench: Bench, draw: Draw, title: str) -> dict[Key, Values]:
    """Return KL in nats of every held-out token, by stack."""
    executors = {
        key: Stacked(stack, draw.amaxes, weights)
        for key, (stack, weights) in draw.stacks.items()
    }
    kl: dict[tuple[str, float], list[Values]] = {key: [] for key in executors}
    batches = torch.cat(list(bench.held_out)).split(BATCH)
    with Progress() as bar:
        task = bar.add_task(title, total=len(executors) * len(batches))
        for ids in batches:
            reference = bench.loaded.forward(ids, Reference())
            p = reference.softmax(dim=-1)
            for key, executor in executors.items():
                logits = bench.loaded.forward(ids, executor)
                values = logits_kl_nats(reference, logits, p).double()
                kl[key].append(values.numpy().ravel())
                bar.advance(task)
    return {key: np.concatenate(values) for key, values in kl.items()}


if __name__ == "__main__":
    main()
