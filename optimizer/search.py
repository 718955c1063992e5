"""From the options of every site to the stacks that nothing beats, exactly.

The best stack under limits is a multiple-choice knapsack: one option from each group,
limits on sums. A small one is solved exactly; of a large one the answer is within a
stated distance of a proven bound (`dual`). The front is the least loss as a function
of two limits, seconds per token and bytes, which falls where either grows: it is
bisected where it may still hide most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from optimizer.dual import EPSILON, SMALL, Found, Solver
from optimizer.knapsack import (
    AXES,
    SLACK,
    Axis,
    Edge,
    Edges,
    Groups,
    Limits,
    Option,
    Picks,
    problem,
    totals,
)
from optimizer.pareto import pareto_mask

__all__ = [
    "AXES",
    "Axis",
    "Edge",
    "Edges",
    "Front",
    "Groups",
    "Option",
    "Picks",
    "front",
    "nearest",
    "solve",
    "totals",
]

SOLVES = 4  # at most so many questions for each point of the front


@dataclass(frozen=True, slots=True)
class Front:
    """Stacks that none beats, fastest first, each with what is proven about it.

    No stack that is as fast and as small loses less than kl · (1 - gap).
    """

    picks: tuple[Picks, ...]
    gaps: tuple[float, ...]

    @property
    def epsilon(self) -> float:
        """The largest gap."""
        return max(self.gaps, default=0.0)


def _limits(
    max_per_token_s: float | None,
    max_first_token_s: float | None,
    max_bytes: float | None,
    max_kl_nats: float | None = None,
) -> Limits:
    given: dict[Axis, float | None] = {
        "per_token_s": max_per_token_s,
        "first_token_s": max_first_token_s,
        "bytes": max_bytes,
        "kl_nats": max_kl_nats,
    }
    return {axis: limit for axis, limit in given.items() if limit is not None}


def _axes(*more: Axis) -> list[Axis]:
    """The axes of the front, and `more`, in the order of AXES."""
    return [a for a in AXES if a != "first_token_s" or a in more]


def solve(
    groups: Groups,
    *,
    edges: Edges = (),
    max_per_token_s: float | None = None,
    max_first_token_s: float | None = None,
    max_bytes: float | None = None,
    max_kl_nats: float | None = None,
    objective: Axis = "kl_nats",
    small: int = SMALL,
) -> Picks | None:
    """Return the stack with the least `objective` within the limits; None: none fits.

    One index into each group; among stacks with an equal objective, the one that is
    best on the other axes. Exact up to `small` options beside one per group, within
    `EPSILON` beyond. Raises ValueError for a group without options.
    """
    limits = _limits(max_per_token_s, max_first_token_s, max_bytes, max_kl_nats)
    solver = Solver(problem(groups, _axes(objective, *limits), edges), small=small)
    found = solver.minimize(objective, limits)
    return None if found is None else solver.problem.picks(found.places)


def _end(solver: Solver, axis: Axis, limits: Limits) -> Found | None:
    """Return the end of the front with the least `axis`, at its least loss."""
    end = solver.minimize(axis, limits)
    if end is None or axis == "kl_nats":
        return end
    reached = solver.problem.totals(end.places)[axis]
    return solver.minimize("kl_nats", {**limits, axis: reached}) or end


def nearest(
    groups: Groups,
    *,
    edges: Edges = (),
    max_bytes: float | None = None,
    objective: Axis = "per_token_s",
) -> Picks:
    """Return what comes nearest to an SLA that nothing meets.

    The least `objective` within `max_bytes`, at its least loss; the smallest stack
    where nothing is small enough.
    """
    solver = Solver(problem(groups, _axes(objective), edges))
    found = _end(solver, objective, _limits(None, None, max_bytes))
    smallest = found or _end(solver, "bytes", {})
    assert smallest is not None  # without a limit there is always an answer
    return solver.problem.picks(smallest.places)


@dataclass(frozen=True, slots=True)
class _Point:
    """An answer, with its sums."""

    found: Found
    per_token_s: float
    kl_nats: float
    bytes: float

    def within(self, level: "_Level") -> bool:
        return all(
            mine <= limit + SLACK * abs(limit)
            for mine, limit in zip((self.per_token_s, self.bytes), level, strict=True)
        )


_Level = tuple[float, float]  # seconds per token, bytes


@dataclass(slots=True)
class _Levels:
    """The least loss within every pair of limits that was asked for."""

    solver: Solver
    limits: Limits  # on everything else
    answers: dict[_Level, _Point | None] = field(default_factory=dict)
    solves: int = 0

    def point(self, found: Found) -> _Point:
        reached = self.solver.problem.totals(found.places)
        return _Point(
            found, reached["per_token_s"], reached["kl_nats"], reached["bytes"]
        )

    def at(self, level: _Level) -> _Point | None:
        """Return the least loss within a level; None: nothing is within it."""
        if level not in self.answers:
            self.answers[level] = self._known(level) or self._solve(level)
        return self.answers[level]

    def _known(self, level: _Level) -> _Point | None:
        """The answer to a wider question that happens to be within this one."""
        for wider, point in self.answers.items():
            wide = wider[0] >= level[0] and wider[1] >= level[1]
            if wide and point and point.within(level):
                return point
        return None

    def _solve(self, level: _Level) -> _Point | None:
        for wider, point in self.answers.items():
            if point is None and wider[0] >= level[0] and wider[1] >= level[1]:
                return None
        self.solves += 1
        mine: Limits = {"per_token_s": level[0], "bytes": level[1]}
        for axis, limit in self.limits.items():
            mine[axis] = min(limit, mine.get(axis, limit))
        found = self.solver.minimize("kl_nats", mine)
        return None if found is None else self.point(found)


@dataclass(frozen=True, slots=True, order=True)
class _Box:
    """Levels between two corners, and how much the front may still hide there."""

    hidden: float = field(init=False)  # negative: the largest comes first
    low: _Level
    high: _Level
    rise: float  # of the loss from the high corner to the low one

    def __post_init__(self) -> None:
        area = (self.high[0] - self.low[0]) * (self.high[1] - self.low[1])
        object.__setattr__(self, "hidden", -area * self.rise)


def _refine(
    levels: _Levels, low: _Level, high: _Level, roof: float, points: int
) -> None:
    """Bisect boxes of levels until `points` stacks are known or nothing is hidden.

    The loss of a level that nothing meets counts as `roof`.
    """

    def loss(level: _Level) -> float:
        point = levels.at(level)
        return roof if point is None else point.kl_nats

    def box(low: _Level, high: _Level) -> _Box:
        return _Box(low, high, max(loss(low) - loss(high), 0.0))

    def count() -> int:
        return len({id(p) for p in levels.answers.values() if p is not None})

    boxes = [box(low, high)]
    most = SOLVES * points  # and each bisection may find two
    while (
        boxes and boxes[0].hidden < 0 and count() <= points - 2 and levels.solves < most
    ):
        (x0, y0), (x1, y1) = (some := heappop(boxes)).low, some.high
        # Across the axis along which the loss changes more.
        if loss((x0, y1)) >= loss((x1, y0)):
            x = (x0 + x1) / 2
            halves = (box((x0, y0), (x, y1)), box((x, y0), (x1, y1)))
        else:
            y = (y0 + y1) / 2
            halves = (box((x0, y0), (x1, y)), box((x0, y), (x1, y1)))
        for half in halves:
            heappush(boxes, half)


def _nondominated(found: Sequence[_Point]) -> list[_Point]:
    """Drop the dominated and the repeated, and sort by seconds per token."""
    rows = np.array([[p.per_token_s, p.kl_nats, p.bytes] for p in found])
    unique, first = np.unique(rows, axis=0, return_index=True)
    kept = first[pareto_mask(unique)]
    return sorted((found[i] for i in kept), key=lambda p: p.per_token_s)


def front(
    groups: Groups,
    points: int = 24,
    *,
    edges: Edges = (),
    max_per_token_s: float | None = None,
    max_first_token_s: float | None = None,
    max_bytes: float | None = None,
    epsilon: float = EPSILON,
    small: int = SMALL,
) -> Front:
    """Return stacks within the limits that none beats on seconds, loss and bytes.

    At most about `points` of them, fastest first: the three ends, then levels of
    seconds per token and of bytes. Empty: nothing fits.
    """
    limits = _limits(max_per_token_s, max_first_token_s, max_bytes)
    layout = problem(groups, _axes(*limits), edges)
    solver = Solver(layout, epsilon, small)
    levels = _Levels(solver, limits)
    ends = [_end(solver, axis, limits) for axis in ("kl_nats", "per_token_s", "bytes")]
    known = [levels.point(end) for end in ends if end is not None]
    if len(known) < len(ends):
        return Front((), ())
    best, fast, small_one = known
    high = (
        max(best.per_token_s, fast.per_token_s, small_one.per_token_s),
        max(best.bytes, fast.bytes, small_one.bytes),
    )
    levels.answers.update(
        {
            high: best,
            (fast.per_token_s, high[1]): fast,
            (high[0], small_one.bytes): small_one,
        }
    )
    roof = max(p.kl_nats for p in known)
    _refine(levels, (fast.per_token_s, small_one.bytes), high, roof, points)
    every = [p for p in levels.answers.values() if p is not None]
    kept = _nondominated([*known, *every])
    picks = tuple(layout.picks(p.found.places) for p in kept)
    return Front(picks, tuple(p.found.gap for p in kept))
