"""What to expect of a model on a device before anything is measured: `estimate`.

Uniform stacks are priced, held against the physical limit and against memory; then
follow what FP8 buys by batch, what the target needs, and which of the stacks to serve.
No weights are read: quality is what a job measures.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType

from optimizer.errors import HardwareError
from optimizer.hardware import Device
from optimizer.kernels import Tables, of_engine
from optimizer.latencies import Latency, latency, per_token_s
from optimizer.ledger import Kinds, Ledger, Served, kinds, served
from optimizer.limits import Limit, limits
from optimizer.spec import SWEPT_FORMATS, LatencySla, Workload
from optimizer.stack import ModelShape
from optimizer.uniform import Uniform, uniforms

BATCHES = (1, 4, 16, 64, 256, 1024)  # at which FP8 is held against 16 bits


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be estimated."""

    model: ModelShape
    device: Device
    workload: Workload
    sla: LatencySla = field(default_factory=LatencySla)
    engine: str = "any"
    formats: tuple[str, ...] = SWEPT_FORMATS
    max_memory_bytes: int | None = None  # None: the device's memory

    @property
    def tables(self) -> Tables | None:
        """The kernels that stand for the engine on the device."""
        return of_engine(self.device.id, self.engine)

    @property
    def room_bytes(self) -> int:
        """Bytes of one device that may be used."""
        own = self.device.memory_bytes
        return own if self.max_memory_bytes is None else min(own, self.max_memory_bytes)


@dataclass(frozen=True, slots=True)
class Priced:
    """A uniform stack that the device runs, with what it takes."""

    name: str
    kept: Mapping[str, str]  # matrices that stay in 16 bits, and why
    cost: Latency
    per_token: Limit
    first_token: Limit
    ledger: Ledger
    fits: bool
    largest_batch: int  # that fits, of the workload's lengths; 0: none
    largest_context: int  # that fits, prompt and output, of the workload's batch
    meets: bool  # the target, if there is one

    def usable(self) -> bool:
        """Whether it fits and meets the target."""
        return self.fits and self.meets


@dataclass(frozen=True, slots=True)
class AtBatch:
    """Seconds per token of every stack at one batch size."""

    batch_size: int
    per_token_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Fp8:
    """Whether FP8 weights buy time, and from which batch size on."""

    pays: bool  # at this batch, by more than the expected error
    stack: (
        str | None
    )  # that buys most, its error against it; None: the device runs none
    speedup: float | None  # of it, over 16 bits
    from_batch: int | None  # the first of BATCHES at which it pays; None: none of them
    to_batch: int | None  # the last
    said: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Which stack to start from, and why."""

    stack: str | None  # None: none that fits meets the target
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The answer. `priced` goes from wide to narrow."""

    ask: Ask
    priced: tuple[Priced, ...]
    refused: Mapping[str, str]  # stacks that the device does not run, and why
    by_batch: tuple[AtBatch, ...]
    fp8: Fp8
    choice: Choice

    @property
    def fastest_limit(self) -> tuple[Limit, Limit]:
        """The least physical limits, of a decode step and of the prefill."""
        return (
            min((p.per_token for p in self.priced), key=lambda x: x.seconds),
            min((p.first_token for p in self.priced), key=lambda x: x.seconds),
        )


def estimate(ask: Ask) -> Estimate:
    """Return what to expect.

    Raises HardwareError where devices cannot be joined, or run no format at all.
    """
    stacks, running = _stacks(ask.model, ask.device, ask.engine, ask.formats)
    if not running:
        why = "; ".join(f"{u.name}: {u.refused}" for u in stacks)
        raise HardwareError(f"{ask.device.name} runs no uniform stack: {why}")
    priced = tuple(_priced(r, ask) for r in running)
    compared = [r for r in running if r.uniform.name in (*_BASES[:2], *_NARROW)]
    by_batch = tuple(_at(batch, compared, ask) for batch in BATCHES)
    refused = {u.name: u.refused for u in stacks if u.refused}
    fp8 = _fp8(priced, by_batch, refused)
    return Estimate(
        ask,
        priced,
        MappingProxyType(refused),
        by_batch,
        fp8,
        _choice(priced, fp8, ask),
    )


@dataclass(frozen=True, slots=True)
class _Running:
    """A uniform stack that the device runs, its sites counted."""

    uniform: Uniform
    kinds: Kinds


@lru_cache(maxsize=64)  # a request differs from the one before in its workload
def _stacks(
    model: ModelShape, device: Device, engine: str, formats: tuple[str, ...]
) -> tuple[tuple[Uniform, ...], tuple[_Running, ...]]:
    """Return the uniform stacks, and those of them that the device runs."""
    stacks = uniforms(model, device, engine, formats)
    running = (_Running(u, kinds(model, u.stack)) for u in stacks if u.stack)
    return stacks, tuple(running)


def _priced(running: _Running, ask: Ask) -> Priced:
    workload = ask.workload
    held = served(ask.model, running.kinds, workload.tensor_parallel)
    ledger = held.ledger(workload)
    cost = latency(running.kinds, ask.model, ask.device, workload, ask.tables)
    each, first = limits(running.kinds, ask.device, workload)
    return Priced(
        name=running.uniform.name,
        kept=running.uniform.kept,
        cost=cost,
        per_token=each,
        first_token=first,
        ledger=ledger,
        fits=ledger.total_bytes <= ask.room_bytes,
        largest_batch=held.largest_batch(workload, ask.room_bytes),
        largest_context=_largest_context(held, ask),
        meets=_meets(cost, ask.sla),
    )


def _largest_context(held: Served, ask: Ask) -> int:
    return held.largest_context(ask.workload, ask.room_bytes, ask.model.max_context)


def _meets(cost: Latency, sla: LatencySla) -> bool:
    each, first = sla.per_token_s, sla.first_token_s
    return (each is None or cost.per_token_s <= each) and (
        first is None or cost.first_token_s <= first
    )


def _at(batch: int, stacks: Sequence[_Running], ask: Ask) -> AtBatch:
    workload = replace(ask.workload, batch_size=batch)
    found = {
        r.uniform.name: per_token_s(
            r.kinds, ask.model, ask.device, workload, ask.tables
        )
        for r in stacks
    }
    return AtBatch(batch, MappingProxyType(found))


# --- FP8 -----------------------------------------------------------------------

_BASES = ("bf16", "fp16", "fp32")  # what FP8 is held against: the first that runs
_NARROW = ("fp8", "fp8_weight_only")


def _fp8(
    priced: Sequence[Priced], by_batch: Sequence[AtBatch], refused: Mapping[str, str]
) -> Fp8:
    rows = {p.name: p for p in priced}
    base = next(rows[n] for n in _BASES if n in rows)
    narrow = [rows[n] for n in _NARROW if n in rows]
    if not narrow:
        why = refused.get("fp8_weight_only") or refused.get("fp8", "")
        return Fp8(False, None, None, None, None, why)
    # Each with its error against it: modelled figures must promise more than timed ones.
    least = {p.name: 1 + _error(base, p) for p in narrow}
    best = min(narrow, key=lambda p: p.cost.per_token_s * least[p.name])
    speedup = base.cost.per_token_s / best.cost.per_token_s
    paying = [
        at.batch_size
        for at in by_batch
        if any(
            at.per_token_s[base.name] > at.per_token_s[name] * needed
            for name, needed in least.items()
        )
    ]
    return Fp8(
        pays=speedup > least[best.name],
        stack=best.name,
        speedup=speedup,
        from_batch=min(paying, default=None),
        to_batch=max(paying, default=None),
        said=_fp8_said(speedup, least[best.name] - 1, base.name, best.name),
    )


def _error(*rows: Priced) -> float:
    """Return the error to expect of the least certain figure; one unknown counts none."""
    return max(
        0.0 if math.isnan(e) else e for e in (p.cost.per_token.error for p in rows)
    )


def _fp8_said(speedup: float, error: float, base: str, best: str) -> str:
    told = f"{best} takes {1 / speedup:.2f} of the time of {base}"
    if speedup > 1 + error:
        return f"{told}: it pays"
    if speedup > 1:
        return (
            f"{told}, which the expected error of {error:.0%} does not tell from none"
        )
    return f"{told}: it buys no time at this batch size"


# --- the choice ------------------------------------------------------------------


def _choice(priced: Sequence[Priced], fp8: Fp8, ask: Ask) -> Choice:
    """Return the stack that loses least of those that fit and meet the target.

    fp32 is not a serving format where there are 16 bits: it costs twice the bytes, and
    what bf16 loses a job measures.
    """
    serving = [p for p in priced if p.name != "fp32"] or list(priced)
    fitting = [p for p in serving if p.fits]
    if not fitting:
        return Choice(None, ("no stack fits the memory",))
    usable = [p for p in fitting if p.meets]
    if not usable:
        nearest = min(fitting, key=lambda p: p.cost.per_token_s)
        missed = (
            f"no uniform stack meets the target; {nearest.name} comes nearest with "
            f"{nearest.cost.per_token_s * 1e3:.3g} ms per token and "
            f"{nearest.cost.first_token_s * 1e3:.3g} ms to the first",
        )
        return Choice(None, missed)
    chosen = usable[0]
    return Choice(chosen.name, tuple(_reasons(chosen, serving, fp8, ask)))


def _reasons(
    chosen: Priced, serving: Sequence[Priced], fp8: Fp8, ask: Ask
) -> list[str]:
    said = []
    for wider in serving[: serving.index(chosen)]:
        lack = "does not fit the memory" if not wider.fits else "misses the target"
        said.append(f"{wider.name} {lack}")
    if chosen.name == "fp8_weight_only":
        said.append(
            "its activations stay in 16 bits, so it loses less than fp8 and moves the "
            "same bytes"
        )
    if not chosen.name.startswith("fp8"):
        targeted = ask.sla.per_token_s or ask.sla.first_token_s
        held = "fits and meets the target" if targeted else "fits"
        said.append(f"{chosen.name} {held}: nothing has to be narrowed")
        if fp8.pays:
            said.append(
                f"{fp8.said}; a job (POST /v1/optimize) measures what that would lose"
            )
        else:
            said.append(fp8.said)
    return said
