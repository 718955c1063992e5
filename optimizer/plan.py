"""What is measured of a front, and which measured stack is the answer.

A round plans on the prediction, measures what it planned, and lets the measurements
correct the prediction (`repair`); the next round plans again. It ends when what was
measured had been predicted within its interval.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from optimizer.choose import Chooser, Totals
from optimizer.pareto import pareto_mask
from optimizer.reasons import would_meet
from optimizer.repair import Measure, Repair, improve
from optimizer.spec import LatencySla, OptimizeSpec
from optimizer.stack import Stack

# Budgets, as shares of the 16-bit stack's predicted loss, at which the fastest stack
# is tried: predictions add up what is measured together, so one may turn out worse.
AS_GOOD_BUDGETS = (0.9, 0.6)
SAME_TIME = 1.02  # times within 2 % are the same time: the smaller stack is better
FRONT_CHECKS = 2  # points of the front that a round measures beside the contenders
AS_GOOD = 1.05  # a measured loss within 5 % of the 16-bit stack's is the same loss
CHOSEN = "chosen"
ROUNDS = 3
MEASUREMENTS = 9  # of whole stacks, at most: each is a pass over the held-out data
EXCHANGES = 1  # of them around a contender whose loss the target decides

T = TypeVar("T")


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
        return nondominated(chooser, [*kept, chosen])

    def with_contender(self, label: str, stack: Stack) -> "Plan":
        """Return the plan with one more contender, unless it has that stack already."""
        if stack in self.stacks.values():
            return self
        return replace(
            self,
            stacks={**self.stacks, label: stack},
            contenders=(*self.contenders, label),
        )

    def measured_only(self, state: Repair) -> "Plan":
        """Return the plan with every stack that was measured, and no other.

        The front is what the corrected prediction leaves of it.
        """
        limit = state.chooser.max_bytes

        def fits(stack: Stack) -> bool:
            return state.chooser.totals(stack).memory_bytes <= limit

        stacks = {k: s for k, s in self.stacks.items() if state.known(s)}
        for number, stack in enumerate(state.stacks.values()):
            if stack not in stacks.values():
                stacks[f"p{len(self.front) + number}"] = stack
        return replace(
            self,
            stacks=stacks,
            contenders=tuple(k for k in self.contenders if k in stacks),
            front=nondominated(
                state.chooser, [*self.front, *(s for s in stacks.values() if fits(s))]
            ),
        )

    def kept(self, label: str, values: "Mapping[str, T]") -> "dict[str, T]":
        """Return the values by label, the chosen contender first and under its role."""
        others = {
            k: v
            for k, v in values.items()
            if k == self.base or k not in self.contenders
        }
        return {CHOSEN: values[label], **others}


def settle(chooser: Chooser, spec: OptimizeSpec, measure: Measure) -> "Settled":
    """Plan, measure and correct until what is planned was predicted well enough."""
    state = Repair(chooser, measure, MEASUREMENTS)
    state.add(_baselines(chooser).values())
    plan = make(state.chooser, spec)
    for _ in range(ROUNDS):
        before = state.chooser
        planned = make(before, spec)
        new = state.add(planned.stacks.values())
        if not all(state.known(planned.stacks[k]) for k in planned.contenders):
            break  # the budget is used up: what was planned before is measured
        plan = planned
        state.rounds += 1
        state.agrees = all(
            known.holds(before.totals(stack).kl_nats)
            for stack in new
            if (known := state.known(stack))
        )
        if state.agrees:
            break
    lossy = plan.stacks.get("least_loss") or plan.stacks.get("nearest")
    if lossy is not None:
        within = state.chooser.totals(lossy)
        plan = plan.with_contender(
            "exchanged", improve(state, lossy, EXCHANGES, within)
        )
    return Settled(plan.measured_only(state), state)


@dataclass(frozen=True, slots=True)
class Settled:
    """The last plan, whose stacks are measured, and what was learned on the way."""

    plan: "Plan"
    repair: Repair

    @property
    def chooser(self) -> Chooser:
        """The search problem, as the measurements corrected it."""
        return self.repair.chooser


def _baselines(chooser: Chooser) -> dict[str, Stack]:
    """Return the uniform 16-bit stack first, and the uniform FP8 one if it runs."""
    label, base = chooser.base()
    narrow = chooser.narrow()
    return {label: base, **({narrow[0]: narrow[1]} if narrow else {})}


def make(chooser: Chooser, spec: OptimizeSpec) -> Plan:
    """Plan by the prediction, as it is now."""
    stacks = _baselines(chooser)
    base_label, base = chooser.base()
    contenders = _contenders(chooser, spec, base_label, base)
    stacks.update(contenders)
    reachable = "nearest" not in contenders
    front = nondominated(chooser, [*chooser.front(), *contenders.values()])
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


def as_good_as(chooser: Chooser, sla: LatencySla, base: Totals) -> list[Stack]:
    """Return the fastest stacks within the targets that should match 16 bits.

    They are predicted to lose no more than the uniform 16-bit stack, and are no
    larger; but for one that is, where its time is worth the memory.
    """
    budgets = [share * base.kl_nats for share in AS_GOOD_BUDGETS]
    found = [chooser.fastest(sla, kl, base.memory_bytes) for kl in budgets]
    small = [stack for stack in found if stack is not None]
    large = chooser.fastest(sla, budgets[0], chooser.max_bytes)
    best_s = min(
        (chooser.totals(s).per_token_s for s in small), default=base.per_token_s
    )
    if large and chooser.totals(large).per_token_s < best_s / SAME_TIME:
        return [*small, large]
    return small


def nondominated(chooser: Chooser, stacks: Sequence[Stack]) -> list[Stack]:
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


def choose(
    plan: Plan, chooser: Chooser, measured: Mapping[str, float]
) -> tuple[str, str]:
    """Return the label of the chosen contender and the outcome, by measured loss."""
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


def advice(
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
