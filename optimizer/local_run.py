"""Seconds of whole stacks on this processor: run, not summed; and what each site took.

A decode step is timed at the workload's mean context, a prefill at its prompt. Stacks
take turns, so that a busy machine is busy for all of them. Of one run come the time of
the whole and of each site in it, where the weights of all other sites have passed
through the caches in between, as they do when a model is served.
"""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from optimizer import local
from optimizer.checkpoint import inspect
from optimizer.construct import construct
from optimizer.errors import HardwareError
from optimizer.hardware import LOCAL
from optimizer.native import Native
from optimizer.spec import OptimizeSpec, Workload
from optimizer.stack import (
    CHOICES,
    WHOLE_MODEL,
    Choice,
    Component,
    ModelShape,
    Site,
    Stack,
)

ENGINE = "torch"
CHOSEN = "chosen"  # the label of the answer
SERVED = "chosen_served"  # the same, exported and under its engine
ROUNDS = 3
STEPS = 4  # of decode, in one turn
LIMIT_S = 3.0  # for each stack, of all turns but the first, and again of all prefills
PROBE_TOKENS = 64  # of a short prefill, which says how long the whole one takes
BYTES_PER_WEIGHT = 4 + 2 + 1  # held in each of the three precisions
MEMORY_SHARE = 0.5  # of what is free, for the weights

# Between them these stacks have every choice of every site that a CPU runs.
PROFILED = (("fp32",), ("bf16",), ("fp8_e4m3_weight_only", "bf16"))
EMBEDDINGS = Site(WHOLE_MODEL, Component.EMBEDDINGS)

Spent = Mapping[Site, float]  # seconds of one step
Key = TypeVar("Key", bound=Hashable)
Told = Callable[[], None]


def silent() -> None:
    """Nobody listens."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a stack took when it was run end to end, and on what."""

    per_token_s: float  # median decode step: every sequence of the batch gets a token
    first_token_s: float | None  # of the whole batch; None: too long to be run
    spread: float  # quartile to quartile of the decode steps, over their median
    steps: int
    engine: str
    version: str
    threads: int


@dataclass(slots=True)
class Times:
    """Every step of one stack: the whole, and each site in it."""

    decode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    decode_sites: list[Spent] = field(default_factory=list)
    prefill_sites: list[Spent] = field(default_factory=list)

    def add(self, other: "Times") -> None:
        """Take in the steps of another run of the same stack."""
        self.decode += other.decode
        self.prefill += other.prefill
        self.decode_sites += other.decode_sites
        self.prefill_sites += other.prefill_sites

    def measured(self) -> Measured:
        """Return the medians, and how far apart the steps were."""
        return Measured(
            per_token_s=statistics.median(self.decode),
            first_token_s=statistics.median(self.prefill) if self.prefill else None,
            spread=spread(self.decode),
            steps=len(self.decode),
            engine=ENGINE,
            version=str(torch.__version__),
            threads=torch.get_num_threads(),
        )


def spread(seconds: Sequence[float]) -> float:
    """Return the distance from quartile to quartile, over the median; 0 of one alone."""
    if len(seconds) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / middle


def opened(folder: Path) -> Native:
    """Load a model to run it. Raises HardwareError where it cannot be run here."""
    checkpoint = inspect(folder)
    free = MEMORY_SHARE * psutil.virtual_memory().available
    held = BYTES_PER_WEIGHT * checkpoint.stored_bytes / 2  # of 16 bits, at the least
    if held > free:
        raise HardwareError(
            f"not run end to end here: in every precision its weights take up to "
            f"{held / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free for them"
        )
    return Native(construct(checkpoint, "sdpa"))


def uniform(model: ModelShape, names: Sequence[str]) -> Stack:
    """Return the stack that has the first of `names` that each site knows."""

    def pick(component: Component) -> Choice:
        known = {c.name: c for c in CHOICES[component]}
        return next(known[name] for name in names if name in known)

    return Stack({s.site: pick(s.site.component) for s in model.sites})


def profiled(model: ModelShape) -> list[Stack]:
    """Return the stacks whose sites, timed, price every choice that runs here."""
    stacks = [uniform(model, names) for names in PROFILED]
    (narrow,) = (c for c in CHOICES[Component.EMBEDDINGS] if c.name == "fp8_e4m3")
    stacks[-1] = Stack({**stacks[-1].choices, EMBEDDINGS: narrow})
    return stacks


def run(
    native: Native, stacks: Mapping[Key, Stack], workload: Workload, told: Told = silent
) -> dict[Key, Times]:
    """Run every stack in turn, and time its decode steps and its prefill.

    `told` is called after every turn, and may raise to stop.
    """
    times = {name: Times() for name in stacks}
    end = time.perf_counter() + LIMIT_S * len(stacks)
    for turn in range(ROUNDS):
        for name, stack in stacks.items():
            if turn == 0 or time.perf_counter() < end:
                native.use(stack)
                _decode(native, workload, times[name])
                told()
    end = time.perf_counter() + LIMIT_S * len(stacks)
    for name, stack in stacks.items():
        native.use(stack)
        _prefill(native, workload, times[name], end)
        told()
    return times


def _decode(native: Native, workload: Workload, times: Times) -> None:
    """Take steps around the mean context, after one that warms up."""
    batch = workload.batch_size
    before = workload.prompt_tokens + max(workload.output_tokens - STEPS, 0) // 2
    cache = native.cache(batch, before + STEPS + 1, before)
    tokens = torch.zeros(batch, 1, dtype=torch.long)
    native.run(tokens, cache)
    for _ in range(STEPS):
        native.spent_until_now()
        start = time.perf_counter()
        tokens = native.run(tokens, cache).argmax(-1)
        times.decode.append(time.perf_counter() - start)
        times.decode_sites.append(native.spent_until_now())


def _prefill(native: Native, workload: Workload, times: Times, end: float) -> None:
    """Run the prompts, unless a short one says that they take too long; again if short."""
    batch, prompt = workload.batch_size, workload.prompt_tokens
    probe = min(PROBE_TOKENS, prompt)
    native.run(_ids(native, 1, probe), native.cache(1, probe))  # warms up
    start = time.perf_counter()
    native.run(_ids(native, 1, probe), native.cache(1, probe))
    now = time.perf_counter()
    if now + (now - start) * batch * prompt / probe > end:
        return
    while len(times.prefill) < (1 if sum(times.prefill) > local.LONG_S else ROUNDS):
        cache, ids = native.cache(batch, prompt), _ids(native, batch, prompt)
        native.spent_until_now()
        start = time.perf_counter()
        native.run(ids, cache)
        times.prefill.append(time.perf_counter() - start)
        times.prefill_sites.append(native.spent_until_now())


def _ids(native: Native, batch: int, tokens: int) -> torch.Tensor:
    return torch.arange(batch * tokens).view(batch, tokens) % native.shape.vocab


def measure_stacks(
    folder: Path, stacks: Mapping[str, Stack], workload: Workload, told: Told = silent
) -> dict[str, Measured]:
    """Run stacks of a model end to end on this processor, taking turns.

    Raises HardwareError where the model, or a choice, cannot be run here.
    """
    distinct = {frozenset(s.choices.items()): s for s in stacks.values()}
    times = run(opened(folder), distinct, workload, told)
    measured = {key: each.measured() for key, each in times.items()}
    return {k: measured[frozenset(s.choices.items())] for k, s in stacks.items()}


def end_to_end(
    spec: OptimizeSpec, model: ModelShape, stacks: Mapping[str, Stack], told: Told
) -> dict[str, Measured]:
    """Run the chosen stack and the uniform ones, where the job is for this processor.

    Nothing for another device, or where the model cannot be run here.
    """
    if spec.hardware != LOCAL:
        return {}
    asked = {k: s for k, s in stacks.items() if k == CHOSEN or k.startswith("all_")}
    asked["all_fp32"] = uniform(model, ("fp32",))
    try:
        return measure_stacks(Path(spec.model_path), asked, spec.workload, told)
    except HardwareError:
        return {}
