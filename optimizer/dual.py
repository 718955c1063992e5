"""The knapsack at scale: a bound from prices, and a stack that comes close to it.

A limit can be traded for a price: the least of `objective + price · (sum - limit)` over
all stacks is found site by site, and no stack within the limit goes below it. The best
such bound is found by cutting planes (Kelley's method): every stack seen so far is a
plane, for every limit that will ever be asked for, so they are kept from one question
to the next. At the best prices few options come close to the best stack; branch and
bound over those alone, the core, gives the answer, and whatever costs more than the
difference between answer and bound is ruled out for good. Where nothing but the core is
left the answer is exact; else its distance to the bound is reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linprog

from optimizer import branch
from optimizer.knapsack import (
    AXES,
    Axis,
    Limits,
    Places,
    Priced,
    Problem,
    Values,
    best,
    priced,
    regrets,
)

EPSILON = 1e-3  # relative distance to the bound at which a large problem is left alone
SMALL = 240  # options beside one per group that branch and bound takes at once
CORE = 100  # of them in the first core
LARGEST = 900  # of them in the last core, if branch and bound must try that
ROUNDS = 60  # of cutting planes
NODES = 20_000  # of branch and bound in a core
_CONVERGED = 1e-2  # of epsilon: how much a bound may still be improved
_ROUNDED = 1e-9  # relative: HiGHS is not more exact
_TIE_WEIGHT = 1e-8  # of the other axes, so that among equals the answer is the best


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A stack, and how far below it a better one might be, relative to its objective."""

    places: Places
    gap: float


@dataclass(slots=True, eq=False)
class Solver:
    """A problem, and every stack that was the best at some prices."""

    problem: Problem
    epsilon: float = EPSILON
    small: int = SMALL
    _sums: list[Values] = field(init=False, default_factory=list)  # of the axes
    _seen: set[bytes] = field(init=False, default_factory=set)

    def minimize(self, objective: Axis, limits: Limits) -> Found | None:
        """Return the stack with the least objective within limits; None: there is none.

        Among stacks with an equal objective, the one that is best on the other axes.
        """
        question = _question(self.problem, objective, limits)
        free = self.problem.real
        if _extra(free) <= self.small:
            return self._exact(question, free)
        bound = self._bound(question)
        return None if bound is None else self._core(question, *bound)

    def _exact(self, question: "_Question", free: branch.Free) -> Found | None:
        answer = question.branch(self.problem, free)
        return None if answer is None else Found(answer.places, 0.0)

    # --- the bound -------------------------------------------------------------

    def _add(self, places: Places) -> bool:
        """Keep a stack; False: it was known."""
        key = places.astype(np.int16).tobytes()
        if key in self._seen:
            return False
        self._seen.add(key)
        self._sums.append(self.problem.sums(places))
        return True

    def _at(self, question: "_Question", prices: Values, weight: float) -> float:
        """Return the least of `weight · objective + prices · (sums - room)`."""
        cost = question.at(self.problem, prices, weight)
        value, places = best(self.problem.forest, cost)
        self._add(places)
        return value - float(prices @ question.room)

    def _bound(self, question: "_Question") -> tuple[float, Values] | None:
        """Return the best bound and its prices; None: no stack is within the limits."""
        count = len(question.axes)
        bound = self._at(question, np.zeros(count), 1.0)
        prices = np.zeros(count)
        for k in range(count):
            self._at(question, np.eye(count)[k] / question.scale[k], 1e-6)
        for _ in range(ROUNDS):
            wanted, promise, feasible = self._master(question)
            if not feasible:
                if self._at(question, wanted, 0.0) > question.tolerance(wanted):
                    return None
                continue
            value = self._at(question, wanted, 1.0)
            if value > bound:
                bound, prices = value, wanted
            if question.gap(promise, bound) <= _CONVERGED * self.epsilon:
                break
        return bound, prices

    def _master(self, question: "_Question") -> tuple[Values, float, bool]:
        """Return the best prices against the stacks seen so far, and their promise.

        The dual of it: the cheapest mixture of stacks within the limits. Where no
        mixture is, the prices of the one that breaks them by least; and False.
        """
        sums = np.array(self._sums)
        over = (sums[:, question.columns] - question.room).T / question.scale[:, None]
        spread = question.spread or 1.0
        mixed = _mixture(sums @ question.weights / spread, over)
        if mixed is not None:
            prices, promise = mixed
            return prices * spread / question.scale, promise * spread, True
        # Let each limit be broken, at a cost of 1 for its whole axis.
        limits = len(over)
        cost = np.concatenate([np.zeros(len(sums)), np.ones(limits)])
        mixed = _mixture(cost, np.hstack([over, -np.eye(limits)]), len(sums))
        assert mixed is not None  # everything is allowed
        return mixed[0] / question.scale, 0.0, False

    # --- the core --------------------------------------------------------------

    def _core(
        self, question: "_Question", bound: float, prices: Values
    ) -> Found | None:
        """Solve over ever more of the options that come closest to the best ones."""
        cost = question.at(self.problem, prices, 1.0)
        regret = regrets(self.problem.forest, cost)
        near = branch.Near(self.epsilon / 2, question.offset, NODES)
        kept, size, best = self.problem.real, CORE, None
        while True:
            free = kept & _cheapest(regret, size)
            whole = bool((free == kept).all())
            answer = question.branch(self.problem, free, near)
            if answer is not None:
                value = question.value(self.problem, answer.places)
                if best is None or value < best[0]:
                    best = value, answer.places
            elif whole and best is None:
                return None
            if best is not None:
                kept = regret <= best[0] - bound + _ROUNDED * question.spread
                if answer and (whole or not (kept & ~free).any()):
                    bound = max(bound, min(answer.bound, best[0]))
                    whole = True
                gap = question.gap(best[0], bound)
                if whole or gap <= self.epsilon or size >= LARGEST:
                    return Found(best[1], gap if gap > _ROUNDED else 0.0)
            size *= 3


def _mixture(
    cost: Values, over: Values, stacks: int | None = None
) -> tuple[Values, float] | None:
    """Return the prices (limits,) of the cheapest mixture of stacks, and its cost.

    `over` (limits, columns) may be 0 at most; the first `stacks` columns are mixed,
    all of them by default. None: no mixture is within the limits.
    """
    shares = np.zeros(len(cost))
    shares[:stacks] = 1.0
    answer = linprog(
        cost,
        A_ub=over,
        b_ub=np.zeros(len(over)),
        A_eq=shares[None],
        b_eq=[1.0],
        method="highs-ds",
    )
    if answer.status != 0 or answer.fun is None:
        return None
    return np.maximum(-answer.ineqlin.marginals, 0.0), float(answer.fun)


def _extra(free: branch.Free) -> int:
    """Count the options beside one per group."""
    return int(free.sum()) - len(free)


def _cheapest(regret: Values, size: int) -> branch.Free:
    """Mark one option per group, and about `size` others with the least regret."""
    flat = np.sort(regret[np.isfinite(regret)])
    last = min(len(regret) + size, len(flat)) - 1
    return regret <= flat[last]


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """An objective, and limits on sums above the problem's least."""

    limits: Limits  # as they were given
    axes: tuple[Axis, ...]  # of the limits
    columns: list[int]  # where they stand in the sums
    room: Values  # (limits,) above the least
    scale: Values  # (limits,) the spread of their axes
    weights: Values  # (axes,) of the objective, the others breaking ties
    every: tuple[Axis, ...]  # the axes of the sums
    spread: float  # of the objective
    offset: float  # of the objective: its least sum

    def at(self, problem: Problem, prices: Values, weight: float) -> Priced:
        """Return everything at these prices for the limits."""
        total = weight * self.weights
        np.add.at(total, self.columns, prices)
        return priced(problem, dict(zip(self.every, total.tolist(), strict=True)))

    def value(self, problem: Problem, places: Places) -> float:
        """Return the objective of a stack above the least, ties included."""
        return float(problem.sums(places) @ self.weights)

    def gap(self, value: float, bound: float) -> float:
        """Return how far a bound is below a value, relative to the whole objective."""
        return max(value - bound, 0.0) / (abs(self.offset + value) or 1.0)

    def tolerance(self, prices: Values) -> float:
        """Return what adding up may add to a violation of nothing."""
        return 1e-11 * float(prices @ self.scale)

    def branch(
        self, problem: Problem, free: branch.Free, near: branch.Near | None = None
    ) -> branch.Answer | None:
        """Solve by branch and bound over the options that are free."""
        nothing = np.zeros(len(self.axes))
        rows = [
            (priced(problem, {axis: 1.0}), float(room))
            for axis, room in zip(self.axes, self.room, strict=True)
        ]
        cost = self.at(problem, nothing, 1.0)
        return branch.minimize(problem, cost, rows, self.limits, free, near)


def _question(problem: Problem, objective: Axis, limits: Limits) -> _Question:
    every = tuple(problem.columns)
    spread = problem.spread(objective)
    weights = np.zeros(len(every))
    for k, axis in enumerate(every):
        if axis == objective:
            weights[k] = 1.0
        elif (other := problem.spread(axis)) > 0:
            weights[k] = _TIE_WEIGHT * (spread or 1.0) / other
    axes: Sequence[Axis] = [a for a in AXES if a in limits]
    return _Question(
        limits=limits,
        axes=tuple(axes),
        columns=[every.index(a) for a in axes],
        room=np.array([limits[a] - problem.least[a] for a in axes]),
        scale=np.array([problem.spread(a) or 1.0 for a in axes]),
        weights=weights,
        every=every,
        spread=spread,
        offset=problem.least[objective],
    )
