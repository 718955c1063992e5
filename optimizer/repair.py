"""From a predicted front to one that holds: measure, correct the prediction, search again.

Each round searches the front with what is known so far, measures stacks that are spread
over it, and lets them correct the prediction (`surrogate`). It ends when everything that
a round measured had been predicted within its interval, when nothing new is left to
measure, or when the rounds or the budget are used up.

Nothing here is random, so the same measurements give the same stacks.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from optimizer.choose import Chooser, Totals
from optimizer.pareto import pareto_mask
from optimizer.stack import Stack
from optimizer.surrogate import IDENTITY, Measured, Surrogate

Measure = Callable[[Sequence[Stack]], Sequence[tuple[float, float, float]]]
"""KL in nats of every stack, with the low and the high end of its interval."""

ROUNDS = 4


@dataclass(slots=True, eq=False)
class Repair:
    """What was measured so far, and a search that has learned from it."""

    chooser: Chooser
    measure: Measure
    budget: int  # measurements, all rounds together
    measured: dict[tuple[str, ...], Measured] = field(default_factory=dict)
    stacks: dict[tuple[str, ...], Stack] = field(default_factory=dict)
    rounds: int = 0
    agrees: bool = False  # whether the last round was predicted within its intervals

    @property
    def left(self) -> int:
        """Measurements that may still be made."""
        return self.budget - len(self.measured)

    def known(self, stack: Stack) -> Measured | None:
        """Return what was measured of a stack; None: nothing."""
        return self.measured.get(stack_key(stack))

    def kl_nats(self, stack: Stack) -> float:
        """Return the measured loss of a stack, the predicted one where it was not."""
        known = self.known(stack)
        return known.kl_nats if known else self.chooser.totals(stack).kl_nats

    def add(self, stacks: Iterable[Stack]) -> list[Stack]:
        """Measure those that are new, as far as the budget goes, and learn from them."""
        new: dict[tuple[str, ...], Stack] = {}
        for stack in stacks:
            if len(new) < self.left and stack_key(stack) not in self.measured:
                new.setdefault(stack_key(stack), stack)
        if new:
            found = self.measure(list(new.values()))
            for (key, stack), values in zip(new.items(), found, strict=True):
                self.measured[key], self.stacks[key] = Measured(*values), stack
            self._learn()
        return list(new.values())

    def _learn(self) -> None:
        plain = replace(self.chooser, surrogate=IDENTITY)
        sums = [plain.kl_sums(stack) for stack in self.stacks.values()]
        fitted = Surrogate.fit(sums, list(self.measured.values()))
        self.chooser = replace(self.chooser, surrogate=fitted)

    def round(self, stacks: Iterable[Stack]) -> list[Stack]:
        """Measure what a round wants: return what was new; nothing new is agreement."""
        self.rounds += 1
        before = self.chooser
        new = self.add(stacks)
        self.agrees = all(
            known.holds(before.totals(stack).kl_nats)
            for stack in new
            if (known := self.known(stack))
        )
        return new

    def front(self) -> list[Stack]:
        """Return the measured stacks that no other measured one beats, fastest first."""
        every = list(self.stacks.values())
        if not every:
            return []
        rows = [(*_cost(self.chooser.totals(s)), self.kl_nats(s)) for s in every]
        kept = [every[i] for i in np.flatnonzero(pareto_mask(np.array(rows)))]
        return sorted(kept, key=lambda s: (_cost(self.chooser.totals(s)), stack_key(s)))


def repair(
    chooser: Chooser,
    measure: Measure,
    *,
    budget: int,
    per_round: int = 8,
    rounds: int = ROUNDS,
    points: int | None = None,
) -> Repair:
    """Search, measure and correct until prediction and measurement agree.

    At most `per_round` stacks of the front in each of at most `rounds` rounds, and
    never more than `budget` in all. `points` is how fine a front is searched, by
    default as fine as the chooser's own.
    """
    state = Repair(chooser, measure, budget)
    while state.rounds < rounds and state.left > 0 and not state.agrees:
        step(state, per_round, points)
    return state


def step(state: Repair, per_round: int, points: int | None = None) -> list[Stack]:
    """Do one round over the front: return what it measured."""
    front = state.chooser.front(points) if points else state.chooser.front()
    new = [stack for stack in front if state.known(stack) is None]
    return state.round(_spread(new, min(per_round, state.left)))


def _spread(stacks: Sequence[Stack], count: int) -> list[Stack]:
    """Return `count` of the stacks, evenly spread, both ends among them."""
    rows = np.linspace(0, len(stacks) - 1, min(count, len(stacks))).round().astype(int)
    return [stacks[i] for i in sorted(set(rows.tolist()))]


def stack_key(stack: Stack) -> tuple[str, ...]:
    """What tells stacks of one model apart."""
    return tuple(stack.to_json().values())


def _cost(totals: Totals) -> tuple[float, int]:
    return totals.per_token_s, totals.memory_bytes
