"""From the options of every site to the stacks that nothing beats, exactly.

Loss, seconds and bytes add up over sites, so the best stack under limits is a
multiple-choice knapsack: one option from each group, limits on sums. HiGHS solves
it by branch and bound, to 1e-8 of the spread between the best and the worst sum;
limits are checked again afterwards, on exactly rounded sums.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from optimizer.pareto import pareto_mask
from optimizer.stack import Choice

Axis = Literal["kl_nats", "per_token_s", "first_token_s", "bytes"]
AXES: tuple[Axis, ...] = ("kl_nats", "per_token_s", "first_token_s", "bytes")
Picks = tuple[int, ...]  # an index into each group

# HiGHS stops at absolute gaps of 1e-6, so the objective's sums are stretched over a
# million. Rows may exceed their limit by 1e-6: theirs are stretched less, since HiGHS
# repairs (and announces on stdout) what a variable of 0.999999 does to a steep row.
_OBJECTIVE_SPREAD = 1e6
_LIMIT_SPREAD = 1e2
_TIE_WEIGHT = 1e-8  # of the other axes, so that among equals the answer is the best
_SLACK = 1e-12  # relative: what adding in another order may change in a sum


@dataclass(frozen=True, slots=True)
class Option:
    """What one choice costs at one site; sites decided together are one option."""

    choice: Choice | tuple[Choice, ...]
    kl_nats: float
    per_token_s: float
    first_token_s: float
    bytes: int


Groups = Sequence[Sequence[Option]]
_Limits = dict[Axis, float]


def totals(groups: Groups, picks: Picks) -> dict[Axis, float]:
    """Return the sums of the picked options, exactly rounded."""
    chosen = [group[i] for group, i in zip(groups, picks, strict=True)]
    return {
        "kl_nats": math.fsum(o.kl_nats for o in chosen),
        "per_token_s": math.fsum(o.per_token_s for o in chosen),
        "first_token_s": math.fsum(o.first_token_s for o in chosen),
        "bytes": float(sum(o.bytes for o in chosen)),
    }


def _undominated(group: Sequence[Option], axes: Sequence[Axis]) -> list[int]:
    """Indices of the options that some stack may need, the first of equal ones."""
    points = np.array([[getattr(o, axis) for axis in axes] for o in group], float)
    _, first = np.unique(points, axis=0, return_index=True)
    first.sort()
    return [int(i) for i in first[pareto_mask(points[first])]]


@dataclass(frozen=True, slots=True)
class _Problem:
    """The knapsack over what pruning left: one variable for every option."""

    groups: Groups
    group: NDArray[np.intp]  # (variables,): whose option it is
    index: NDArray[np.intp]  # (variables,): where it stands in its group
    columns: dict[Axis, NDArray[np.float64]]  # (variables,) above the group's least
    least: _Limits  # sums that no stack goes below

    def scaled(self, axis: Axis, spread: float) -> NDArray[np.float64]:
        return self.columns[axis] * self.factor(axis, spread)

    def factor(self, axis: Axis, spread: float) -> float:
        """Stretch the sums of an axis from 0..(worst - least) to 0..spread."""
        starts = np.flatnonzero(np.diff(self.group, prepend=-1))
        worst = float(np.maximum.reduceat(self.columns[axis], starts).sum())
        return spread / worst if worst > 0 else 0.0

    def meets(self, picks: Picks, limits: _Limits) -> bool:
        reached = totals(self.groups, picks)
        return all(
            reached[axis] <= limit + _SLACK * abs(limit)
            for axis, limit in limits.items()
        )

    def picks(self, chosen: NDArray[np.bool_]) -> Picks:
        return tuple(int(i) for i in self.index[chosen])


def _problem(groups: Groups, axes: Sequence[Axis]) -> _Problem:
    for position, options in enumerate(groups):
        if not options:
            raise ValueError(f"group {position} has no options")
    kept = [_undominated(group, axes) for group in groups]
    group = np.repeat(np.arange(len(groups)), [len(k) for k in kept])
    index = np.concatenate(kept).astype(np.intp)
    columns: dict[Axis, NDArray[np.float64]] = {}
    least: _Limits = {}
    for axis in axes:
        values = [[getattr(groups[g][i], axis) for i in k] for g, k in enumerate(kept)]
        least[axis] = math.fsum(min(v) for v in values)
        columns[axis] = np.concatenate([np.subtract(v, min(v)) for v in values])
    return _Problem(groups, group, index, columns, least)


def _rows(problem: _Problem, limits: _Limits) -> list[LinearConstraint]:
    """One option from each group, and every limit on a sum."""
    variables = np.arange(len(problem.group))
    one_each = csr_array((np.ones(len(variables)), (problem.group, variables)))
    rows = [LinearConstraint(one_each, 1, 1)]
    for axis, limit in limits.items():
        room = limit - problem.least[axis]
        # An axis without spread keeps its sign: its room alone decides.
        stretch = problem.factor(axis, _LIMIT_SPREAD) or 1.0
        row = problem.columns[axis][None, :] * stretch
        rows.append(LinearConstraint(row, -np.inf, room * stretch))
    return rows


def _cut(problem: _Problem, picks: Picks) -> LinearConstraint:
    """Everything but `picks`."""
    same = problem.index == np.asarray(picks)[problem.group]
    return LinearConstraint(same[None, :].astype(float), -np.inf, len(picks) - 1)


def _minimize(problem: _Problem, objective: Axis, limits: _Limits) -> Picks | None:
    """Return the best stack within `limits`; None: there is none."""
    cost = problem.scaled(objective, _OBJECTIVE_SPREAD)
    for axis in AXES:  # in this order, so that the sum is the same every time
        if axis in problem.columns and axis != objective:
            cost = cost + problem.scaled(axis, _OBJECTIVE_SPREAD * _TIE_WEIGHT)
    rows = _rows(problem, limits)
    while True:
        answer = milp(
            cost,
            integrality=np.ones(len(cost), dtype=int),
            bounds=Bounds(0, 1),
            constraints=rows,
            options={"mip_rel_gap": 0},
        )
        if answer.x is None:
            return None
        picks = problem.picks(answer.x > 0.5)
        if problem.meets(picks, limits):
            return picks
        rows.append(_cut(problem, picks))  # it broke a limit by less than HiGHS sees


def _limits(
    max_per_token_s: float | None,
    max_first_token_s: float | None,
    max_bytes: float | None,
    max_kl_nats: float | None = None,
) -> _Limits:
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
    max_per_token_s: float | None = None,
    max_first_token_s: float | None = None,
    max_bytes: float | None = None,
    max_kl_nats: float | None = None,
    objective: Axis = "kl_nats",
) -> Picks | None:
    """Return the stack with the least `objective` within the limits; None: none fits.

    One index into each group; among stacks with an equal objective, the one that is
    best on the other axes. Raises ValueError for a group without options.
    """
    limits = _limits(max_per_token_s, max_first_token_s, max_bytes, max_kl_nats)
    return _minimize(_problem(groups, _axes(objective, *limits)), objective, limits)


def _end(problem: _Problem, axis: Axis, limits: _Limits) -> Picks | None:
    """Return the end of the front with the least `axis`, at its least loss."""
    end = _minimize(problem, axis, limits)
    if end is None or axis == "kl_nats":
        return end
    reached = totals(problem.groups, end)[axis]
    return _minimize(problem, "kl_nats", {**limits, axis: reached})


def nearest(
    groups: Groups, *, max_bytes: float | None = None, objective: Axis = "per_token_s"
) -> Picks:
    """Return what comes nearest to an SLA that nothing meets.

    The least `objective` within `max_bytes`, at its least loss; the smallest stack
    where nothing is small enough.
    """
    problem = _problem(groups, _axes(objective))
    found = _end(problem, objective, _limits(None, None, max_bytes))
    smallest = found or _end(problem, "bytes", {})
    assert smallest is not None  # without a limit there is always an answer
    return smallest


@dataclass(frozen=True, slots=True, order=True)
class _Gap:
    """A rectangle between two neighbors where the front may still go anywhere."""

    area: float = field(init=False)  # negative: the largest comes first
    left: float
    top: float
    right: float
    bottom: float

    def __post_init__(self) -> None:
        area = (self.left - self.right) * (self.top - self.bottom)
        object.__setattr__(self, "area", area)


def _between(
    problem: _Problem,
    axis: Axis,
    ends: tuple[Picks, Picks],
    count: int,
    limits: _Limits,
) -> list[Picks]:
    """Solve for the least loss at `count` levels of `axis` between two ends.

    Each level halves the gap that could hide the largest share of the front, so
    levels gather where loss and cost still trade.
    """

    def at(picks: Picks) -> tuple[float, float]:
        reached = totals(problem.groups, picks)
        return reached[axis], reached["kl_nats"]

    gaps = [_Gap(*at(ends[0]), *at(ends[1]))]
    found: list[Picks] = []
    while gaps and gaps[0].area < 0 and len(found) < count:
        gap = heappop(gaps)
        level = (gap.left + gap.right) / 2
        picks = _minimize(problem, "kl_nats", {**limits, axis: level})
        assert picks is not None  # the left end is within the level
        x, kl = at(picks)
        found.append(picks)
        # Up to the level nothing beats `picks`, so the right gap starts there.
        heappush(gaps, _Gap(gap.left, gap.top, x, kl))
        heappush(gaps, _Gap(level, kl, gap.right, gap.bottom))
    return found


def _nondominated(groups: Groups, found: Sequence[Picks]) -> list[Picks]:
    """Drop the dominated and the repeated, and sort by seconds per token."""
    rows = [[totals(groups, p)[axis] for axis in _axes()] for p in found]
    points, first = np.unique(np.array(rows), axis=0, return_index=True)
    kept = first[pareto_mask(points)]
    return sorted(
        (found[i] for i in kept), key=lambda p: totals(groups, p)["per_token_s"]
    )


def front(
    groups: Groups,
    points: int = 24,
    *,
    max_per_token_s: float | None = None,
    max_first_token_s: float | None = None,
    max_bytes: float | None = None,
) -> list[Picks]:
    """Return stacks within the limits that none beats on seconds, loss and bytes.

    At most about `points` of them, fastest first: the three ends, then levels of
    seconds per token, and a quarter of the levels in bytes. Empty: nothing fits.
    """
    limits = _limits(max_per_token_s, max_first_token_s, max_bytes)
    problem = _problem(groups, _axes(*limits))
    best = _end(problem, "kl_nats", limits)
    if best is None:
        return []
    found = [best]
    levels = max(points - 3, 0)
    share: dict[Axis, int] = {"per_token_s": levels - levels // 4, "bytes": levels // 4}
    for axis, count in share.items():
        end = _end(problem, axis, limits)
        assert end is not None  # `best` is within the limits
        found += [end, *_between(problem, axis, (end, best), count, limits)]
    return _nondominated(groups, found)
