"""The whole road on one page: a spec goes in, the report document comes out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optimizer import (
    as_served,
    casts,
    document,
    document_beyond,
    kernels,
    local_prices,
    local_run,
    narrate,
    parallel,
    plan,
    profiled,
    stack_file,
)
from optimizer.as_exported import joined, require_class, writable
from optimizer.beyond import Found
from optimizer.casts import Casts
from optimizer.checkpoint import inspect
from optimizer.choose import (
    Chooser,
    CostOf,
    allowed,
    candidates,
    fp8_share,
    modelled,
    tabulate,
)
from optimizer.contrast import Contrast
from optimizer.document import Rounding, Run, Verdict
from optimizer.errors import HardwareError
from optimizer.execute import Amaxes
from optimizer.export_files import Outlet
from optimizer.exports import Chosen, export
from optimizer.formats import FP16
from optimizer.hardware import LOCAL, Device, device
from optimizer.hybrid import doubtful, settled
from optimizer.kernels import Tables
from optimizer.narrate import Said
from optimizer.on_device import as_one
from optimizer.one_pass import casts_of_pass, generates, of_pass
from optimizer.pieces import Memory, Pieces
from optimizer.plan import Answer, Front
from optimizer.quantize import overflows
from optimizer.recode import rounded_sites
from optimizer.spec import OptimizeSpec
from optimizer.stack import ModelShape, Site, Stack
from optimizer.stack_file import Fault, StackFileError
from optimizer.validate import (
    Quality,
    TokenValues,
    Validation,
    quality,
    reference_perplexity,
)
from optimizer.work import Work

Progress = Callable[[str, float, str], None]
"""(phase, fraction of it, detail), called at least each second; raises Cancelled to stop."""

Measured = Callable[[list[dict[str, Any]]], None]
"""Told of stacks as they are measured: seconds, nats with their interval, bytes, share in FP8."""

# Phases: load, calibrate, sweep, search, validate, export, report.
SWEEP_SHARE = 0.9  # of the sweep's time; the rest is the contrast
HEADROOM = 0.9  # of the device's memory; the rest is activations and the engine


@dataclass(slots=True)
class _Meter:
    """Tells progress where the run is, and again at every layer in between."""

    progress: Progress
    phase: str = "load"
    fraction: float = 0.0
    detail: str = ""

    start: float = 0.0  # of the part of the phase that runs
    share: float = 1.0

    def enter(self, phase: str) -> None:
        self.phase, self.fraction, self.detail = phase, 0.0, ""
        self.part(0.0, 1.0)
        self.tick()

    def part(self, start: float, share: float) -> None:
        """What is told next is a part of the phase."""
        self.start, self.share = start, share

    def at(self, fraction: float, detail: str = "") -> None:
        self.fraction = max(self.fraction, min(1.0, self.start + self.share * fraction))
        self.detail = detail
        self.tick()

    def tick(self, layer: int = 0) -> None:
        self.progress(self.phase, self.fraction, self.detail)


def optimize(
    spec: OptimizeSpec,
    progress: Progress,
    pieces: Pieces | None = None,
    profile: Tables | None = None,
    outlet: Outlet | None = None,
    measured: Measured | None = None,
    said: Said = narrate.nobody,
) -> dict[str, Any]:
    """Find the stack that loses least within the targets, and the evidence for it.

    `pieces` keeps what was computed, and may have others compute some of it; `profile`
    is what was measured on the device that the request names; exports go to `outlet`
    (None: nothing is exported); `measured` hears of whole stacks before the end,
    and `said` what the run comes across, in lines.
    Raises ModelError, DatasetError, HardwareError or NonFiniteError before the first
    pass where the request cannot be served, and whatever `progress` raises.
    """
    meter = _Meter(progress)
    meter.enter("load")
    work = Work(spec, pieces or Memory(), meter.at, on_layer=meter.tick)
    shape = work.opened()
    require_class(shape.architecture, spec.engine, spec.exports)
    target, basis, cost_of, pairs = _target(spec, shape, meter.tick, profile)
    if not generates(shape):
        cost_of, pairs = of_pass(cost_of), casts_of_pass(pairs)
    said(narrate.model(shape, target.name, basis))

    meter.enter("calibrate")
    said(narrate.data(work.tokens))
    largest = work.amaxes()
    verdicts = allowed(shape, target, spec, _overflowing(largest))
    verdicts = writable(shape, spec, verdicts)

    meter.enter("sweep")
    wanted = candidates(verdicts)
    for line in (narrate.swept(wanted, verdicts), *narrate.refused(verdicts)):
        said(line)
    meter.part(0.0, SWEEP_SHARE)
    losses = work.sensitivities(wanted)
    meter.part(SWEEP_SHARE, 1 - SWEEP_SHARE)
    contrast = work.contrast(wanted)

    meter.enter("search")
    table = tabulate(shape, verdicts, losses, cost_of)
    bound = joined(shape, spec.engine)
    limit = spec.max_memory_bytes or int(HEADROOM * target.memory_bytes)
    limit *= spec.workload.tensor_parallel  # bytes of a stack are of all devices
    chooser = Chooser(shape, table, limit, pairs, as_one=bound, searched=work.front)
    doubts = doubtful(chooser.front(plan.COARSE), losses)
    if doubts:
        losses = settled(losses, work.exact(doubts))
        said(narrate.doubted(doubts))
        table = tabulate(shape, verdicts, losses, cost_of)
        chooser = replace(chooser, table=table)

    meter.enter("validate")
    measuring = _Measuring(work, meter, chooser, measured, said)
    front, answer = _answered(chooser, measuring, spec)
    result = _run(work, (front, answer), measuring, (target, basis), contrast)
    meter.part(0.0, 1.0)
    meter.at(1.0)  # it may end before its budget does

    meter.enter("export")
    if outlet is not None:
        result = replace(result, exported=_exported(work, result, outlet, meter))

    meter.enter("report")
    runs = local_run.end_to_end(spec, shape, result.stacks, meter.tick)
    runs |= _served(result)
    used = None if spec.hardware == LOCAL else profile
    result = as_served.decided(replace(result, runs=runs, profile=used))
    return document.build(result)


def _answered(
    chooser: Chooser, measuring: "_Measuring", spec: OptimizeSpec
) -> tuple[Front, Answer]:
    """Search for the answer, or measure the stack that came with the request."""
    known = None if spec.stack is None else _known(chooser, Stack.from_json(spec.stack))
    if known is not None and spec.stack_use == "validate":
        front = plan.front_beside(chooser, measuring, known)
        return front, plan.given(front, known, spec.latency_sla)
    front = plan.measured_front(chooser, measuring, known)
    return front, plan.answer(front, spec.latency_sla)


def _known(chooser: Chooser, stack: Stack) -> Stack:
    """Return a given stack. Raises StackFileError naming what cannot be run of it."""
    faults = [*stack_file.site_faults(stack, chooser.model)]
    for site, rows in chooser.table.items():
        choice = stack.choices.get(site)
        row = next((r for r in rows if r.choice == choice), None)
        if choice is not None and (row is None or row.refused):
            why = row.refused if row else "it was not asked for among the formats"
            faults.append(Fault(f"/stack/{site}", f"{choice.name}: {why}"))
    if faults:
        raise StackFileError(faults)
    return stack


class _Measuring:
    """Runs whole stacks on the held-out data, and keeps what came out."""

    def __init__(
        self,
        work: Work,
        meter: _Meter,
        chooser: Chooser,
        told: Measured | None,
        said: Said,
    ) -> None:
        self._work = work
        self._meter = meter
        self._chooser = chooser
        self._told = told
        self._said = said
        self._found: dict[str, tuple[Quality, TokenValues]] = {}

    def __call__(self, stacks: Sequence[Stack]) -> list[tuple[float, float, float]]:
        share = 1 / plan.MEASUREMENTS
        self._meter.part(share * len(self._found), share * len(stacks))
        every = self._work.validated(stacks)
        for stack, values in zip(stacks, every, strict=True):
            found = quality(values, self._work.spec.seed)
            self._found[_name(stack)] = found, values
        if self._told is not None:
            self._told([self._row(stack) for stack in stacks])
        kl = [self.of(stack).kl_nats for stack in stacks]
        added = [self._chooser.totals(stack).kl_nats for stack in stacks]
        self._said(
            narrate.measured(list(zip(added, (k.value for k in kl), strict=True)))
        )
        return [(one.value, one.low, one.high) for one in kl]

    def _row(self, stack: Stack) -> dict[str, Any]:
        totals, kl = self._chooser.totals(stack), self.of(stack).kl_nats
        return {
            "per_token_s": float(totals.per_token_s),
            "kl_nats": kl.value,
            "kl_nats_low": kl.low,
            "kl_nats_high": kl.high,
            "memory_bytes": int(totals.memory_bytes),
            "fp8_share": fp8_share(self._work.outline.shape, stack),
        }

    def of(self, stack: Stack) -> Quality:
        """Return the figures of a stack that was run."""
        return self._found[_name(stack)][0]

    def values(self, stack: Stack) -> TokenValues:
        """Return what the stack does to every token."""
        return self._found[_name(stack)][1]


def _name(stack: Stack) -> str:
    return " ".join(stack.to_json().values())


def _run(
    work: Work,
    found: tuple[Front, Answer],
    measuring: _Measuring,
    target: tuple[Device, str],
    contrast: Contrast,
) -> Run:
    (front, answer), spec, checkpoint = found, work.spec, inspect(work.folder)
    qualities = {k: measuring.of(stack) for k, stack in answer.stacks.items()}
    chosen = qualities[plan.CHOSEN], measuring.values(answer.stack)
    rounding, chosen, found_beyond = _rounding(work, answer.stack, chosen)
    qualities[plan.CHOSEN] = chosen[0]
    nll, likely = work.reference()
    looked = document_beyond.looked(
        spec,
        checkpoint,
        work.tokens.validation,
        (*chosen, likely),
        work.elsewhere,
        work.beyond(answer.stack, found_beyond),
    )
    advice = plan.advice(answer, front.chooser, spec)
    validation = Validation(
        tokens=work.tokens.validation.tokens,
        reference_perplexity=reference_perplexity(nll),
        stacks=qualities,
    )
    return Run(
        spec=spec,
        model=work.outline,
        checkpoint=checkpoint,
        tokens=work.tokens,
        device=target[0],
        basis=target[1],
        chooser=front.chooser,
        repair=front.repair,
        front=answer.front,
        stacks=answer.stacks,
        validation=validation,
        verdict=Verdict(answer.outcome, plan.CHOSEN, advice),
        contrast=contrast,
        rounding=rounding,
        experts=work.experts(),
        evidence=work.evidence(answer.stack),
        looked=looked,
        executed=as_one(work.places),
    )


def _exported(work: Work, run: Run, outlet: Outlet, meter: _Meter) -> dict[str, Any]:
    label = run.verdict.label
    chosen = Chosen(run.stacks[label], run.rounding.used, run.validation.stacks[label])
    return export(work, chosen, outlet, meter.at)


def _served(run: Run) -> dict[str, local_run.Measured]:
    """Return what an engine took for the exported stack, where it served it here."""
    checkpoint = (run.exported or {}).get("checkpoint") or {}
    taken = checkpoint.get("served_seconds", {"error": "it was not asked for"})
    return {} if "error" in taken else {local_run.SERVED: local_run.Measured(**taken)}


def _rounding(
    work: Work, stack: Stack, nearest: tuple[Quality, TokenValues]
) -> tuple[Rounding, tuple[Quality, TokenValues], Found | None]:
    """Round the chosen stack's weights as asked; keep what measures better.

    Returns its figures and what it does beyond the held-out data, None: not known yet.
    """
    asked, kl = work.spec.rounding, nearest[0].kl_nats
    if asked == "nearest" or not rounded_sites(stack):
        return Rounding(asked, "nearest", kl), nearest, None
    values, gain, beyond = work.compensated(stack)
    found = quality(values, work.spec.seed)
    if found.kl_nats.value < kl.value:
        rounding = Rounding(asked, "compensated", kl, found.kl_nats, gain)
        return rounding, (found, values), beyond
    return Rounding(asked, "nearest", kl, found.kl_nats, gain), nearest, None


def _target(
    spec: OptimizeSpec,
    shape: ModelShape,
    told: local_run.Told,
    profile: Tables | None,
) -> tuple[Device, str, CostOf, Casts]:
    """Return the device, the basis of its latencies, and what sites and casts cost."""
    ways = spec.workload.tensor_parallel
    if spec.hardware != LOCAL:
        target = device(spec.hardware)
        _require_split(shape, target, ways)
        known = kernels.of_engine(target.id, spec.engine)
        pairs = casts.modelled(shape, target, spec.workload, tables=known)
        others = modelled(shape, target, spec.workload, known)
        if profile is None:
            return target, "modelled", others, pairs
        costs = profiled.preferring(profile, others, shape, target, spec.workload)
        covered = profiled.covers(costs, shape)
        return target, "measured" if covered else "modelled", costs, pairs
    if ways > 1:
        raise HardwareError(parallel.ALONE)
    folder = Path(spec.model_path)
    target, costs, pairs = local_prices.target(folder, shape, spec.workload, told)
    return target, "measured", costs, pairs


def _require_split(shape: ModelShape, target: Device, ways: int) -> None:
    no = parallel.refusal(shape, target, ways)
    if no is not None:
        raise HardwareError(no)


def _overflowing(largest: Amaxes) -> dict[Site, float]:
    """Return the amax of the sites with values beyond fp16's range."""
    found: dict[Site, float] = {}
    for (site, _), amax in largest.items():
        if overflows(amax, FP16):
            found[site] = max(float(amax.max()), found.get(site, 0.0))
    return found
