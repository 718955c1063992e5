"""What is measured of a front, and which measured stack is the answer.

What is measured of the front does not depend on the target: the uniform stacks, those
that should match 16 bits, and points spread over the rest. Each round measures what the
prediction promises and lets that correct the prediction (`repair`); it ends when what
was measured had been predicted within its interval. A target then adds one stack at
most, the one that it asks for; so another target on the same model, data and device
measures no more than that, and says the same of the front.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optimizer.choose import Chooser, Totals
from optimizer.pareto import pareto_mask
from optimizer.reasons import would_meet
from optimizer.repair import Measure, Repair
from optimizer.spec import LatencySla, OptimizeSpec
from optimizer.stack import Stack

# Budgets, as shares of the 16-bit stack's predicted loss, at which the fastest stack
# is tried: predictions add up what is measured together, so one may turn out worse.
AS_GOOD_BUDGETS = (0.9, 0.6)
SAME_TIME = 1.02  # times within 2 % are the same time: the smaller stack is better
FRONT_CHECKS = 2  # points of the front that a round measures beside these
AS_GOOD = 1.05  # a measured loss within 5 % of the 16-bit stack's is the same loss
CHOSEN = "chosen"
ROUNDS = 3
COARSE = 8  # points of a front that is searched before it is corrected
FRONT_STACKS = 8  # measured at most, whatever the target: each is a pass over the data
MEASUREMENTS = FRONT_STACKS + 1  # the target's own is the last
NO_TARGET = LatencySla()


@dataclass(frozen=True, slots=True)
class Front:
    """Stacks that nothing beats in the corrected prediction, and what was measured."""

    repair: Repair
    stacks: list[Stack]  # fastest first

    @property
    def chooser(self) -> Chooser:
        """The search problem, as the measurements corrected it."""
        return self.repair.chooser

    def fitting(self, sla: LatencySla) -> list[Stack]:
        """Return the measured stacks within the memory and the targets."""
        return [s for s in self.repair.stacks.values() if _fits(self.chooser, s, sla)]


@dataclass(frozen=True, slots=True)
class Answer:
    """The chosen stack, and what is known beside it."""

    stack: Stack
    outcome: str  # sla_met, sla_not_met, no_improvement
    front: list[Stack]  # the chosen one among them
    stacks: dict[str, Stack]  # all that were measured, by label


def measured_front(
    chooser: Chooser, measure: Measure, start: Stack | None = None
) -> Front:
    """Search, measure and correct until what is searched was predicted well enough.

    A stack to `start` from is measured first: the prediction learns from it, and it may
    be the answer.
    """
    state = Repair(chooser, measure, FRONT_STACKS)
    state.add([*_uniform(chooser).values(), *([start] if start else [])])
    while state.rounds < ROUNDS and state.left > 0 and not state.agrees:
        state.round(_wanted(state.chooser))
    return _front(state)


def front_beside(chooser: Chooser, measure: Measure, stack: Stack) -> Front:
    """Measure a given stack and the uniform ones; the rest of the front is predicted."""
    state = Repair(chooser, measure, FRONT_STACKS)
    state.add([*_uniform(chooser).values(), stack])
    return _front(state)


def _front(state: Repair) -> Front:
    chooser = state.chooser
    measured = [s for s in state.stacks.values() if _fits(chooser, s, NO_TARGET)]
    return Front(state, nondominated(chooser, [*chooser.front(), *measured]))


def _uniform(chooser: Chooser) -> dict[str, Stack]:
    """Return the uniform 16-bit stack first, and the uniform FP8 one if it runs."""
    label, base = chooser.base()
    narrow = chooser.narrow()
    return {label: base, **({narrow[0]: narrow[1]} if narrow else {})}


def _wanted(chooser: Chooser) -> list[Stack]:
    """Return what a round measures: what should match 16 bits, and some of the rest."""
    front = chooser.front(COARSE)
    lossy = [s for s in front if chooser.totals(s).kl_nats > 0]
    return [*as_good_as(chooser), *_spread(lossy, FRONT_CHECKS)]


def as_good_as(chooser: Chooser) -> list[Stack]:
    """Return the fastest stacks that should match 16 bits, whatever the targets.

    They are predicted to lose no more than the uniform 16-bit stack, and are no
    larger; but for one that is, where its time is worth the memory.
    """
    base = chooser.totals(chooser.base()[1])
    budgets = [share * base.kl_nats for share in AS_GOOD_BUDGETS]
    found = [chooser.fastest(NO_TARGET, kl, base.memory_bytes) for kl in budgets]
    small = [stack for stack in found if stack is not None]
    large = chooser.fastest(NO_TARGET, budgets[0], chooser.max_bytes)
    best_s = min(
        (chooser.totals(s).per_token_s for s in small), default=base.per_token_s
    )
    if large and chooser.totals(large).per_token_s < best_s / SAME_TIME:
        return [*small, large]
    return small


def nondominated(chooser: Chooser, stacks: Iterable[Stack]) -> list[Stack]:
    """Return distinct stacks that no other dominates in the prediction, fastest first."""
    unique: dict[tuple[float, float, int], Stack] = {}
    for stack in stacks:
        unique.setdefault(_objectives(chooser, stack), stack)
    points = np.array(list(unique), dtype=np.float64).reshape(-1, 3)
    on_front = pareto_mask(points)
    kept = [(k, s) for (k, s), on in zip(unique.items(), on_front, strict=True) if on]
    return [s for _, s in sorted(kept, key=lambda pair: pair[0])]


def _objectives(chooser: Chooser, stack: Stack) -> tuple[float, float, int]:
    totals = chooser.totals(stack)
    return totals.per_token_s, totals.kl_nats, totals.memory_bytes


def _spread(items: list[Stack], count: int) -> list[Stack]:
    """Return `count` of the items, evenly spread from the first one on."""
    picked = np.linspace(0, len(items), count, endpoint=False).astype(int)
    return [items[i] for i in sorted(set(picked.tolist())) if items]


def _fits(chooser: Chooser, stack: Stack, sla: LatencySla) -> bool:
    return _within(chooser, chooser.totals(stack), sla)


def _within(chooser: Chooser, totals: Totals, sla: LatencySla) -> bool:
    return totals.memory_bytes <= chooser.max_bytes and totals.meets(sla)


# The answer


def answer(front: Front, sla: LatencySla) -> Answer:
    """Return the stack that loses least within the targets, by measurement.

    Measures the stack that the targets ask for, unless what was measured already
    answers them.
    """
    state, wanted = front.repair, asked(front, sla)
    state.budget += 1
    if wanted is None and not front.fitting(sla):
        stack = front.chooser.nearest(sla)
        state.add([stack])
    else:
        ask = [] if wanted is None else [wanted]
        state.add(ask)
        stack = choose(front, [*front.fitting(sla), *ask])
    return _answer(front, stack, sla)


def given(front: Front, stack: Stack, sla: LatencySla) -> Answer:
    """Return a stack that was given and measured as the answer, whatever it meets."""
    return _answer(front, stack, sla)


def _answer(front: Front, stack: Stack, sla: LatencySla) -> Answer:
    chooser, measured = front.chooser, front.repair.stacks.values()
    return Answer(
        stack=stack,
        outcome=outcome(chooser, stack, chooser.totals(stack), sla),
        front=_front_with(front, stack),
        stacks=_labelled(measured, _uniform(chooser), stack),
    )


def outcome(chooser: Chooser, stack: Stack, taken: Totals, sla: LatencySla) -> str:
    """Return what came of a request that gets a stack with these totals."""
    if not _within(chooser, taken, sla):
        return "sla_not_met"
    unchanged = stack.choices == chooser.base()[1].choices
    return "no_improvement" if unchanged else "sla_met"


def asked(front: Front, sla: LatencySla) -> Stack | None:
    """Return the stack that the targets ask for; None: none beside the measured ones.

    The fastest that should match 16 bits, else the one with the least loss.
    """
    chooser = front.chooser
    base = chooser.base()[1]
    good = _as_good(front, front.fitting(sla))
    if any(stack.choices != base.choices for stack in good):
        return None
    totals = chooser.totals(base)
    budget = AS_GOOD_BUDGETS[0] * totals.kl_nats
    found = chooser.fastest(sla, budget, totals.memory_bytes)
    if found is not None or good:
        return found
    return chooser.least_loss(sla, totals.memory_bytes)


def choose(front: Front, fitting: Sequence[Stack]) -> Stack:
    """Return the best of some measured stacks.

    Of those as good as 16 bits the fastest, else the one that lost least; no larger
    than the 16-bit stack where that is possible.
    """
    chooser = front.chooser
    good = _as_good(front, fitting)
    if good:
        return _quickest(chooser, good)
    limit = chooser.totals(chooser.base()[1]).memory_bytes
    small = [s for s in fitting if chooser.totals(s).memory_bytes <= limit]
    return min(small or fitting, key=front.repair.kl_nats)


def _as_good(front: Front, stacks: Iterable[Stack]) -> list[Stack]:
    """Return the stacks whose measured loss is the 16-bit stack's or less."""
    state = front.repair
    limit = AS_GOOD * state.kl_nats(front.chooser.base()[1])
    return [s for s in stacks if state.kl_nats(s) <= limit]


def _quickest(chooser: Chooser, stacks: Sequence[Stack]) -> Stack:
    """Return the fastest; of those as fast as it, the smallest."""
    totals: list[tuple[Totals, Stack]] = [(chooser.totals(s), s) for s in stacks]
    limit = SAME_TIME * min(t.per_token_s for t, _ in totals)
    fast = [(t, s) for t, s in totals if t.per_token_s <= limit]
    return min(fast, key=lambda f: (f[0].memory_bytes, f[0].per_token_s, f[0].kl_nats))[
        1
    ]


def _front_with(front: Front, chosen: Stack) -> list[Stack]:
    """Return the front with the chosen stack on it.

    What was predicted to beat a stack that the measurement chose is withdrawn.
    """
    chooser = front.chooser
    if chosen in front.stacks:
        return nondominated(chooser, front.stacks)
    mine = _objectives(chooser, chosen)
    kept = [
        stack
        for stack in front.stacks
        if pareto_mask(np.array([mine, _objectives(chooser, stack)]))[0]
    ]
    return nondominated(chooser, [*kept, chosen])


def _labelled(
    measured: Iterable[Stack], uniform: Mapping[str, Stack], chosen: Stack
) -> dict[str, Stack]:
    """Return the stacks by label: the chosen one, the uniform ones, then the others."""
    roles = {CHOSEN: chosen, **uniform}
    others = [s for s in measured if s not in roles.values()]
    return {**roles, **{f"p{i}": stack for i, stack in enumerate(others)}}


def advice(answer: Answer, chooser: Chooser, spec: OptimizeSpec) -> tuple[str, ...]:
    """Say what would meet the targets; nothing where they are met."""
    if answer.outcome != "sla_not_met":
        return ()
    return tuple(would_meet(chooser, chooser.totals(answer.stack), spec))
