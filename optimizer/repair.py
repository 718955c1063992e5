"""From a predicted front to one that holds: measure, correct the prediction, search again.

Each round searches the front with what is known so far, measures stacks that are spread
over it, and lets them correct the prediction (`surrogate`). It ends when everything that
a round measured had been predicted within its interval, when nothing new is left to
measure, or when the rounds or the budget are used up. What is left of the budget goes
to a local search on measured values: around a stack the changes of one site, and the
exchanges between two, that are likeliest to turn out better than predicted.

Nothing here is random, so the same measurements give the same stacks.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from optimizer.choose import Chooser, Totals
from optimizer.pareto import pareto_mask
from optimizer.stack import Stack
from optimizer.surrogate import IDENTITY, Measured, Surrogate

Measure = Callable[[Sequence[Stack]], Sequence[tuple[float, float, float]]]
"""KL in nats of every stack, with the low and the high end of its interval."""

ROUNDS = 4
DOUBT = 0.1  # relative error of a prediction, while no residual is known
PAYS = 4  # exchanges of one change that are considered
CLOSE = 1e-9  # relative: what rounding may move a limit


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
    """Do one round: return what it measured; nothing new is agreement as well."""
    state.rounds += 1
    before = state.chooser
    front = before.front(points) if points else before.front()
    new = [stack for stack in front if state.known(stack) is None]
    new = state.add(_spread(new, min(per_round, state.left)))
    state.agrees = all(
        known.holds(before.totals(stack).kl_nats)
        for stack in new
        if (known := state.known(stack))
    )
    return new


def _spread(stacks: Sequence[Stack], count: int) -> list[Stack]:
    """Return `count` of the stacks, evenly spread, both ends among them."""
    rows = np.linspace(0, len(stacks) - 1, min(count, len(stacks))).round().astype(int)
    return [stacks[i] for i in sorted(set(rows.tolist()))]


def stack_key(stack: Stack) -> tuple[str, ...]:
    """What tells stacks of one model apart."""
    return tuple(stack.to_json().values())


def _cost(totals: Totals) -> tuple[float, int]:
    return totals.per_token_s, totals.memory_bytes


# --- around a stack ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Move:
    """Other options for one or two groups of a stack, and what changes with them."""

    picks: tuple[tuple[int, int], ...]  # group, option
    lost: float  # predicted weighted loss, nats
    doubt: float  # how wrong that may be, nats
    seconds: float  # per token
    bytes: int

    def __add__(self, other: "Move") -> "Move":
        return Move(
            (*self.picks, *other.picks),
            self.lost + other.lost,
            self.doubt + other.doubt,
            self.seconds + other.seconds,
            self.bytes + other.bytes,
        )


def improve(state: Repair, stack: Stack, count: int, within: Totals) -> Stack:
    """Measure `count` neighbors of a stack at most; return the best that was measured.

    Neighbors keep to the time and memory of `within`. A neighbor that measures better
    becomes the place to go on from.
    """
    state.add([stack])
    spent = 0
    while spent < count and state.left > 0:
        moves = sorted(_moves(state.chooser, stack, within), key=_promise)
        other = _first_new(state, stack, moves, within)
        if other is None:
            break
        state.add([other])
        spent += 1
        if state.kl_nats(other) < state.kl_nats(stack):
            stack = other
    return stack


def _first_new(
    state: Repair, stack: Stack, moves: Iterable[Move], within: Totals
) -> Stack | None:
    limits = _cost(within)
    for move in moves:
        other = moved(state.chooser, stack, move)
        cost = _cost(state.chooser.totals(other))
        fits = all(c <= x * (1 + CLOSE) for c, x in zip(cost, limits, strict=True))
        if fits and state.known(other) is None:
            return other
    return None


def _promise(move: Move) -> tuple[float, tuple[tuple[int, int], ...]]:
    """Sort key: how many deviations a move must be lucky by to gain anything."""
    return move.lost / move.doubt if move.doubt > 0 else math.inf, move.picks


def _moves(chooser: Chooser, stack: Stack, within: Totals) -> Iterator[Move]:
    """Yield the changes of one group that stay within, and exchanges between two.

    A change that loses less but costs too much is exchanged with the changes elsewhere
    that make up for it and lose least. (Casts between the two groups of an
    exchange are left out here: whether it fits is checked again.)
    """
    now = chooser.totals(stack)
    seconds = within.per_token_s * (1 + CLOSE) - now.per_token_s
    room = within.memory_bytes - now.memory_bytes
    alone = list(singles(chooser, stack))
    pays = sorted((m for m in alone if m.lost >= 0), key=lambda m: m.lost)
    saved = np.array([[m.seconds, m.bytes] for m in pays]).reshape(-1, 2)
    owner = np.array([m.picks[0][0] for m in pays])
    for one in alone:
        if one.seconds <= seconds and one.bytes <= room:
            yield one
        elif one.lost < 0:
            left = [seconds - one.seconds, room - one.bytes]
            fitting = (saved <= left).all(axis=1) & (owner != one.picks[0][0])
            for k in np.flatnonzero(fitting)[:PAYS]:
                yield one + pays[int(k)]


def singles(chooser: Chooser, stack: Stack) -> Iterator[Move]:
    """Yield every change of one group that is better in something."""
    doubt = chooser.surrogate.residual or DOUBT
    picks = [
        g.choices.index(tuple(stack.choices[s] for s in g.sites))
        for g in chooser.groups
    ]
    for g, group in enumerate(chooser.groups):
        mine = group.options[picks[g]]
        casts = _casts(chooser, picks, g)
        for i, option in enumerate(group.options):
            lost = option.kl_nats - mine.kl_nats
            seconds = option.per_token_s - mine.per_token_s
            seconds += float(casts[i] - casts[picks[g]])
            size = option.bytes - mine.bytes
            if i != picks[g] and min(lost, seconds, size) < 0:
                wrong = doubt * (option.kl_nats + mine.kl_nats)
                yield Move(((g, i),), lost, wrong, seconds, size)


def _casts(chooser: Chooser, picks: Sequence[int], group: int) -> NDArray[np.float64]:
    """Return the seconds of the casts beside a group, for each of its options."""
    total = np.zeros(len(chooser.groups[group].options))
    for edge in chooser.edges:
        if edge.left == group:
            total += edge.per_token_s[:, picks[edge.right]]
        elif edge.right == group:
            total += edge.per_token_s[picks[edge.left], :]
    return total


def moved(chooser: Chooser, stack: Stack, move: Move) -> Stack:
    """Return the stack after a move."""
    choices = dict(stack.choices)
    for g, i in move.picks:
        group = chooser.groups[g]
        choices.update(zip(group.sites, group.choices[i], strict=True))
    return Stack(choices)
