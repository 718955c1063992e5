"""The whole road on one page: a spec goes in, the report document comes out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from optimizer import document, local
from optimizer.checkpoint import inspect
from optimizer.choose import (
    SAME_TIME,
    Chooser,
    CostOf,
    allowed,
    as_good_as,
    candidates,
    modelled,
    tabulate,
)
from optimizer.document import Run, Verdict
from optimizer.execute import Amaxes
from optimizer.formats import FP16
from optimizer.hardware import LOCAL, Device, device
from optimizer.hybrid import doubtful, settled
from optimizer.pareto import pareto_mask
from optimizer.pieces import Memory, Pieces
from optimizer.quantize import overflows
from optimizer.reasons import would_meet
from optimizer.spec import OptimizeSpec
from optimizer.stack import ModelShape, Site, Stack
from optimizer.validate import Validation, quality, reference_perplexity
from optimizer.work import Work

Progress = Callable[[str, float, str], None]
"""(phase, fraction of it, detail), called at least each second; raises Cancelled to stop."""

# Phases: load, calibrate, sweep, search, validate, report.
FRONT_CHECKS = 2  # points of the front that are validated beside the chosen stack
AS_GOOD = 1.05  # a measured loss within 5 % of the 16-bit stack's is the same loss
CHOSEN = "chosen"
HEADROOM = 0.9  # of the device's memory; the rest is activations and the engine


@dataclass(slots=True)
class _Meter:
    """Tells progress where the run is, and again at every layer in between."""

    progress: Progress
    phase: str = "load"
    fraction: float = 0.0
    detail: str = ""

    def enter(self, phase: str) -> None:
        self.phase, self.fraction, self.detail = phase, 0.0, ""
        self.tick()

    def at(self, fraction: float, detail: str = "") -> None:
        self.fraction, self.detail = fraction, detail
        self.tick()

    def tick(self, layer: int = 0) -> None:
        self.progress(self.phase, self.fraction, self.detail)


def optimize(
    spec: OptimizeSpec, progress: Progress, pieces: Pieces | None = None
) -> dict[str, Any]:
    """Find the stack that loses least within the targets, and the evidence for it.

    `pieces` keeps what was computed, and may have others compute some of it.
    Raises ModelError, DatasetError, HardwareError or NonFiniteError before the first
    pass where the request cannot be served, and whatever `progress` raises.
    """
    meter = _Meter(progress)
    meter.enter("load")
    work = Work(spec, pieces or Memory(), meter.at, on_layer=meter.tick)
    read, shape = work.tokens, work.outline.shape
    target, basis, cost_of = _target(spec, shape)

    meter.enter("calibrate")
    largest = work.amaxes()
    verdicts = allowed(shape, target, spec, _overflowing(largest))

    meter.enter("sweep")
    wanted = candidates(verdicts)
    losses = work.sensitivities(wanted)
    contrast = work.contrast(wanted)

    meter.enter("search")
    table = tabulate(shape, verdicts, losses, cost_of)
    limit = spec.max_memory_bytes or int(HEADROOM * target.memory_bytes)
    chooser = Chooser(shape, table, limit)
    plan = _plan(chooser, spec)
    doubts = doubtful(plan.neighbors(), losses)
    if doubts:
        losses = settled(losses, work.exact(doubts))
        chooser = Chooser(shape, tabulate(shape, verdicts, losses, cost_of), limit)
        plan = _plan(chooser, spec)

    meter.enter("validate")
    validation = _validate(work, plan.stacks)

    meter.enter("report")
    label, outcome = choose(plan, chooser, validation)
    return document.build(
        Run(
            spec=spec,
            model=work.outline,
            checkpoint=inspect(work.folder),
            tokens=read,
            device=target,
            basis=basis,
            chooser=chooser,
            front=plan.front_with(label, chooser),
            stacks=plan.kept(label, plan.stacks),
            validation=replace(validation, stacks=plan.kept(label, validation.stacks)),
            verdict=Verdict(outcome, CHOSEN, _advice(plan, label, chooser, spec)),
            contrast=contrast,
        )
    )


def _validate(work: Work, stacks: Mapping[str, Stack]) -> Validation:
    nll = work.reference_nll()
    found = work.validated(list(stacks.values()))
    return Validation(
        tokens=work.tokens.validation.tokens,
        reference_perplexity=reference_perplexity(nll),
        stacks={
            label: quality(values, work.spec.seed)
            for label, values in zip(stacks, found, strict=True)
        },
    )


def _target(spec: OptimizeSpec, shape: ModelShape) -> tuple[Device, str, CostOf]:
    """Return the device, the basis of its latencies, and what a site costs on it."""
    if spec.hardware != LOCAL:
        target = device(spec.hardware)
        return target, "modelled", modelled(shape, target, spec.workload)
    target = local.device()
    return target, "measured", local.measured(shape, target, spec.workload)


def _overflowing(largest: Amaxes) -> dict[Site, float]:
    """Return the amax of the sites with values beyond fp16's range."""
    found: dict[Site, float] = {}
    for (site, _), amax in largest.items():
        if overflows(amax, FP16):
            found[site] = max(float(amax.max()), found.get(site, 0.0))
    return found


@dataclass(frozen=True, slots=True)
class Plan:
    """What gets validated: baselines, contenders for the choice, points of the front."""

    base: str  # label of the uniform 16-bit stack
    stacks: dict[str, Stack]
    contenders: tuple[str, ...]  # labels
    reachable: bool  # whether any stack meets the targets
    front: list[Stack]

    def neighbors(self) -> list[Stack]:
        """Return the first contender, and what lies beside it on the front."""
        mine = self.stacks[self.contenders[0]]
        if mine not in self.front:
            return [mine]
        at = self.front.index(mine)
        return [mine, *self.front[max(at - 1, 0) : at], *self.front[at + 1 : at + 2]]

    def front_with(self, label: str, chooser: Chooser) -> list[Stack]:
        """Return the front with the chosen stack on it.

        What was predicted to beat a stack that the measurement chose is withdrawn.
        """
        chosen = self.stacks[label]
        if chosen in self.front:
            return self.front
        mine = _objectives(chooser, chosen)
        kept = [
            stack
            for stack in self.front
            if pareto_mask(np.array([mine, _objectives(chooser, stack)]))[0]
        ]
        return _nondominated(chooser, [*kept, chosen])

    def kept(self, label: str, values: "Mapping[str, T]") -> "dict[str, T]":
        """Return the values by label, the chosen contender first and under its role."""
        others = {
            k: v
            for k, v in values.items()
            if k == self.base or k not in self.contenders
        }
        return {CHOSEN: values[label], **others}


T = TypeVar("T")


def _plan(chooser: Chooser, spec: OptimizeSpec) -> Plan:
    base_label, base = chooser.base()
    stacks = {base_label: base}
    narrow = chooser.narrow()
    if narrow is not None:
        stacks[narrow[0]] = narrow[1]
    contenders = _contenders(chooser, spec, base_label, base)
    stacks.update(contenders)
    reachable = "nearest" not in contenders
    front = _nondominated(chooser, [*chooser.front(), *contenders.values()])
    lossy = [i for i, s in enumerate(front) if chooser.totals(s).kl_nats > 0]
    for index in _spread(lossy, FRONT_CHECKS):
        if front[index] not in stacks.values():
            stacks[f"p{index}"] = front[index]
    return Plan(base_label, stacks, tuple(contenders), reachable, front)


def _contenders(
    chooser: Chooser, spec: OptimizeSpec, base_label: str, base: Stack
) -> dict[str, Stack]:
    """Return the stacks that may be chosen; which one, the measurement says."""
    sla = spec.latency_sla
    totals = chooser.totals(base)
    best = chooser.least_loss(sla, totals.memory_bytes)
    if best is None:
        return {"nearest": chooser.nearest(sla)}
    if chooser.totals(best).kl_nats > totals.kl_nats:
        return {"least_loss": best}
    good = as_good_as(chooser, sla, totals)
    found = {f"as_good_{i}": stack for i, stack in enumerate(good)}
    if totals.meets(sla) and totals.memory_bytes <= chooser.max_bytes:
        found[base_label] = base
    return found or {"least_loss": best}


def _nondominated(chooser: Chooser, stacks: list[Stack]) -> list[Stack]:
    """Return distinct stacks that no other dominates in the prediction, fastest first."""
    unique: dict[tuple[float, float, int], Stack] = {}
    for stack in stacks:
        unique.setdefault(_objectives(chooser, stack), stack)
    points = np.array(list(unique), dtype=np.float64)
    on_front = pareto_mask(points)
    kept = [(k, s) for (k, s), on in zip(unique.items(), on_front, strict=True) if on]
    return [s for _, s in sorted(kept, key=lambda pair: pair[0])]


def _objectives(chooser: Chooser, stack: Stack) -> tuple[float, float, int]:
    totals = chooser.totals(stack)
    return totals.per_token_s, totals.kl_nats, totals.memory_bytes


def _spread(items: list[int], count: int) -> list[int]:
    """Return `count` of the items, evenly spread from the first one on."""
    picked = np.linspace(0, len(items), count, endpoint=False).astype(int)
    return [items[i] for i in sorted(set(picked.tolist())) if items]


def choose(plan: Plan, chooser: Chooser, validation: Validation) -> tuple[str, str]:
    """Return the label of the chosen contender and the outcome, by measured loss."""
    measured = {k: validation.stacks[k].kl_nats.value for k in plan.stacks}
    limit = AS_GOOD * measured[plan.base]
    good = [k for k in plan.contenders if measured[k] <= limit]
    if good:
        label = _quickest(chooser, {k: plan.stacks[k] for k in good})
    else:
        label = min(plan.contenders, key=lambda k: measured[k])
    if not plan.reachable:
        return label, "sla_not_met"
    unchanged = plan.stacks[label].choices == plan.stacks[plan.base].choices
    return label, "no_improvement" if unchanged else "sla_met"


def _advice(
    plan: Plan, label: str, chooser: Chooser, spec: OptimizeSpec
) -> tuple[str, ...]:
    """Say what would meet the targets; nothing where they are met."""
    if plan.reachable:
        return ()
    return tuple(would_meet(chooser, chooser.totals(plan.stacks[label]), spec))


def _quickest(chooser: Chooser, stacks: Mapping[str, Stack]) -> str:
    """Return the label of the fastest; of those as fast as it, of the smallest."""
    totals = {label: chooser.totals(stack) for label, stack in stacks.items()}
    limit = SAME_TIME * min(t.per_token_s for t in totals.values())
    fast = {label: t for label, t in totals.items() if t.per_token_s <= limit}
    return min(
        fast,
        key=lambda k: (fast[k].memory_bytes, fast[k].per_token_s, fast[k].kl_nats),
    )
