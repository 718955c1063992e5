"""Our front against the true one: every stack of a small problem, measured.

    python -m tests.bench.truth          # 8 sites × 3 choices: 6,561 stacks, all of them

A Llama of four layers over bytes, trained here on the built-in text (about a minute),
with eight matrices free in three of its layers and everything else in bf16: bf16, FP8
weights alone, or FP8 on both sides. Its time and bytes are modelled as those of a layer
32 times as wide in a batch of 512 on an L4, where decoding is compute-bound, so that the
three choices trade seconds, bytes and loss against each other.

Every stack runs end to end on held-out text; stacks that share their first choices
share the layers up to there. Ours is what the product does: sweep on calibration text,
search, measure what the front promises, correct, search again. Both fronts are of measured KL, modelled seconds and bytes; hypervolumes
are below the worst of all stacks on every axis. The last line is JSON.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from optimizer import casts, datasets, sensitivity
from optimizer.calibrate import amaxes, calibrate
from optimizer.choose import Chooser, modelled, tabulate
from optimizer.execute import Amaxes, Reference, Stacked, WeightCodes
from optimizer.hardware import device
from optimizer.metrics import bootstrap_interval, logits_kl_nats
from optimizer.model import LoadedModel, instrument
from optimizer.pareto import hypervolume_3d, pareto_mask
from optimizer.repair import Repair, step
from optimizer.spec import Workload
from optimizer.stack import Choice, ModelShape, Site, Stack, choice_named

FREE = (
    "layers.0.ffn_in",
    "layers.0.ffn_out",
    "layers.1.attn_qkv",
    "layers.1.attn_out",
    "layers.1.ffn_in",
    "layers.3.attn_qkv",
    "layers.3.ffn_in",
    "layers.3.ffn_out",
)
NAMES = ("bf16", "fp8_e4m3_weight_only", "fp8_e4m3")
WIDTH, INNER, LAYERS = 128, 352, 4
WIDER = 32  # times, for seconds and bytes
HARDWARE = "l4"
WORKLOAD = Workload(batch_size=512, prompt_tokens=128, output_tokens=128)
MOST = 0.05  # of the stacks, that ours may evaluate
Key = tuple[str, ...]


@dataclass(slots=True, eq=False)
class Truth:
    """Runs stacks end to end, and keeps per-token KL of each."""

    loaded: LoadedModel
    ids: Tensor  # (sequences, tokens)
    amaxes: Amaxes
    weights: WeightCodes
    fixed: Mapping[Site, Choice]
    free: Sequence[Site]
    kl: dict[Key, NDArray[np.float64]] = field(default_factory=dict)

    def every(self) -> Iterator[int]:
        """Measure all stacks, deepest layer innermost; yields how many are done."""
        with torch.no_grad():
            logits = self.loaded.forward(self.ids, Reference()).flatten(0, 1)
            reference = logits, logits.softmax(dim=-1)
            yield from self._below((), 0, None, reference)

    def _below(
        self,
        names: Key,
        stage: int,
        hidden: Tensor | None,
        reference: tuple[Tensor, Tensor],
    ) -> Iterator[int]:
        if len(names) == len(self.free):
            out = self._run(names, stage, self.loaded.stages, hidden)
            kl = logits_kl_nats(reference[0], out.flatten(0, 1), reference[1])
            self.kl[names] = kl.double().numpy()
            yield len(self.kl)
            return
        layer = self.free[len(names)].layer
        here = [s for s in self.free if s.layer == layer]
        hidden = self._run(names, stage, layer + 1, hidden)
        for more in product(NAMES, repeat=len(here)):
            yield from self._below((*names, *more), layer + 1, hidden, reference)

    def _run(self, names: Key, first: int, stop: int, hidden: Tensor | None) -> Tensor:
        """Run stages from `first` up to `stop` with the free sites decided so far."""
        stack = Stack(
            {**self.fixed, **choices(dict(zip(self.free, names, strict=False)))}
        )
        executor = Stacked(stack, self.amaxes, self.weights)
        for stage in range(first, stop):
            hidden = self.loaded.stage(stage, self.ids, hidden, executor)
        assert hidden is not None
        return hidden

    def measure(self, stacks: Sequence[Stack]) -> list[tuple[float, float, float]]:
        """Look the stacks up."""
        found = []
        for stack in stacks:
            kl = self.kl[tuple(stack.choices[s].name for s in self.free)]
            low, high = bootstrap_interval(
                kl, block=32, samples=500, seed=0, confidence=0.95
            )
            found.append((float(kl.mean()), low, high))
        return found


def choices(names: Mapping[Site, str]) -> dict[Site, Choice]:
    return {s: choice_named(s.component, n) for s, n in names.items()}


def trained(text: Tensor, steps: int) -> LoadedModel:
    """Return a small Llama over bytes, trained on `text` (bytes,)."""
    torch.manual_seed(0)
    network = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
    )
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    generator = torch.Generator().manual_seed(0)
    for done in range(steps):
        ids = windows(text, 16, 64, generator)
        loss = network(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if done % 50 == 49:
            print(f"step {done + 1}: {loss.item():.3f} nats per byte", flush=True)
    return instrument(network.eval().requires_grad_(False), "LlamaForCausalLM")


def windows(
    text: Tensor, count: int, length: int, generator: torch.Generator
) -> Tensor:
    """Return (count, length) bytes from random places."""
    starts = torch.randint(len(text) - length, (count, 1), generator=generator)
    return text[starts + torch.arange(length)]


def half(documents: Sequence[str]) -> Tensor:
    return torch.tensor(list("\n\n".join(documents).encode()))


def wide(shape: ModelShape) -> ModelShape:
    """The same model, so much wider: what seconds and bytes are counted of."""
    sites = tuple(
        replace(
            s,
            n=s.n * WIDER,
            k=s.k * WIDER,
            weight_elements=s.weight_elements * WIDER**2,
            heads=s.heads * WIDER,
            kv_heads=s.kv_heads * WIDER,
            elements=s.elements * WIDER,
            parts=tuple(p * WIDER for p in s.parts),
        )
        for s in shape.sites
    )
    return replace(shape, hidden=shape.hidden * WIDER, sites=sites)


def problem(arguments: argparse.Namespace) -> tuple[Chooser, Truth]:
    """Train, calibrate, sweep and set up both sides."""
    read = datasets.load("web_text")
    loaded = trained(half(read.calibration), arguments.steps)
    generator = torch.Generator().manual_seed(1)
    seen = windows(half(read.calibration), 4 * arguments.sequences, 128, generator)
    held_out = windows(half(read.validation), arguments.sequences, 128, generator)
    free = [Site.parse(name) for name in FREE]
    fixed = {
        s: choice_named(s.component, "bf16") for s in loaded.sites if s not in free
    }
    candidates = {
        s: [choice_named(s.component, n) for n in NAMES] if s in free else [fixed[s]]
        for s in loaded.sites
    }
    sequences = list(seen.split(1))
    largest = amaxes(calibrate(loaded, sequences))
    weights = WeightCodes(loaded)
    losses = sensitivity.measure(loaded, sequences, candidates, largest, weights)
    shape, target = wide(loaded.shape), device(HARDWARE)
    verdicts = {s: dict.fromkeys(some) for s, some in candidates.items()}
    table = tabulate(shape, verdicts, losses, modelled(shape, target, WORKLOAD))
    chooser = Chooser(shape, table, 10**12, casts.modelled(shape, target, WORKLOAD))
    return chooser, Truth(loaded, held_out, largest, weights, fixed, free)


def ours(chooser: Chooser, truth: Truth, budget: int, points: int) -> Repair:
    """Measure the front round by round, until nothing new is on it."""
    state = Repair(chooser, truth.measure, budget)
    while state.left > 0 and step(state, budget // 6, points):
        pass
    return state


def objectives(chooser: Chooser, truth: Truth) -> tuple[list[Key], NDArray[np.float64]]:
    """Return seconds, bytes and measured KL of all stacks, each axis scaled to 0..1."""
    keys = list(truth.kl)
    rows = []
    for key in keys:
        named = choices(dict(zip(truth.free, key, strict=True)))
        totals = chooser.totals(Stack(dict(sorted({**truth.fixed, **named}.items()))))
        rows.append((totals.per_token_s, totals.memory_bytes, truth.kl[key].mean()))
    points = np.array(rows)
    low, high = points.min(axis=0), points.max(axis=0)
    return keys, (points - low) / (high - low)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--points", type=int, default=160)
    arguments = parser.parse_args()
    chooser, truth = problem(arguments)
    start = time.perf_counter()
    count = len(NAMES) ** len(FREE)
    for done in truth.every():
        if done % 243 == 0:
            print(f"{done} of {count} stacks", end="\r", flush=True)
    every_s = time.perf_counter() - start
    start = time.perf_counter()
    state = ours(chooser, truth, int(MOST * count), arguments.points)
    ours_s = time.perf_counter() - start
    report(chooser, truth, state, {"every_s": every_s, "search_s": ours_s})


def report(
    chooser: Chooser, truth: Truth, state: Repair, seconds: dict[str, float]
) -> None:
    keys, points = objectives(chooser, truth)
    where = {key: i for i, key in enumerate(keys)}
    mine = [
        where[tuple(s.choices[f].name for f in truth.free)]
        for s in state.stacks.values()
    ]
    worst = (1.0, 1.0, 1.0)
    full = hypervolume_3d(points[pareto_mask(points)], worst)
    print(f"{'':28}{'stacks':>8}{'on front':>10}{'hypervolume':>13}{'/ true':>9}")
    ratios = {}
    for name, rows in (
        ("all stacks", list(range(len(keys)))),
        ("ours, the first fifth", mine[: len(mine) // 5]),
        ("ours, the first half", mine[: len(mine) // 2]),
        ("ours", mine),
        ("as many at random", list(random_rows(len(keys), len(mine)))),
    ):
        some = points[rows]
        front = some[pareto_mask(some)]
        volume = hypervolume_3d(front, worst)
        ratios[name] = volume / full
        print(
            f"{name:28}{len(rows):8}{len(front):10}{volume:13.5f}{volume / full:9.4f}"
        )
    predicted = [chooser.totals(s).kl_nats for s in state.stacks.values()]
    corrected = [state.chooser.totals(s).kl_nats for s in state.stacks.values()]
    measured = [one.kl_nats for one in state.measured.values()]
    figures = {
        "hypervolume_ratio": ratios["ours"],
        "stacks_evaluated_share": len(mine) / len(keys),
        "first_fifth_hypervolume_ratio": ratios["ours, the first fifth"],
        "random_hypervolume_ratio": ratios["as many at random"],
        "stacks": len(keys),
        "rounds": state.rounds,
        "predicted_error_median": median_error(predicted, measured),
        "corrected_error_median": median_error(corrected, measured),
        **seconds,
    }
    print(json.dumps({k: round(v, 5) for k, v in figures.items()}))


def random_rows(count: int, size: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).permutation(count)[:size]


def median_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    errors = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True) if m > 0]
    return float(np.median(errors))


if __name__ == "__main__":
    main()
