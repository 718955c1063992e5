"""The knapsack by branch and bound (HiGHS): exact, and slow where there are many sites.

One variable for every option, and one for every pair of options that a cast ties
together; the pairs are linearized by their marginals, which is tight on trees. HiGHS
solves to 1e-8 of the spread between the best and the worst sum; limits are checked
again afterwards, on exactly rounded sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array

from optimizer.knapsack import Limits, Places, Priced, Problem, Values
from optimizer.quiet import stdout_without

# HiGHS stops at absolute gaps of 1e-6, so the objective's sums are stretched over a
# million. A variable of 0.999999 counts as 1: rows are not steep, their largest
# coefficient is 1, and what breaks a limit by less than HiGHS sees is cut off.
_OBJECTIVE_SPREAD = 1e6

Free = NDArray[np.bool_]  # (groups, width): options that a group may still get


@dataclass(frozen=True, slots=True, eq=False)
class _Variables:
    """The options and pairs that are left open; all else is decided."""

    first: Places  # (groups,): what a decided group has
    group: Places  # (options,)
    place: Places  # (options,)
    number: Places  # (groups, width): which variable an option is; -1: none
    edge: Places  # (pairs,)
    upper: Places  # (pairs,): place at the parent
    lower: Places  # (pairs,): place at the child
    multi: NDArray[np.bool_]  # (groups,): open

    @property
    def count(self) -> int:
        return len(self.group) + len(self.edge)

    def places(self, x: Values) -> Places:
        """Return the stack that a solution stands for."""
        places = self.first.copy()
        chosen = x[: len(self.group)] > 0.5
        places[self.group[chosen]] = self.place[chosen]
        return places


def _variables(problem: Problem, free: Free) -> _Variables:
    multi = free.sum(axis=1) > 1
    group, place = np.nonzero(free & multi[:, None])
    number = np.full(free.shape, -1)
    number[group, place] = np.arange(len(group))
    forest = problem.forest
    parent, child = forest.parent, forest.child
    both = (multi[parent] & multi[child])[:, None, None]
    edge, upper, lower = np.nonzero(
        free[parent][:, :, None] & free[child][:, None, :] & both
    )
    first = free.argmax(axis=1)
    return _Variables(first, group, place, number, edge, upper, lower, multi)


def _row(problem: Problem, variables: _Variables, cost: Priced) -> tuple[float, Values]:
    """Return the constant and the coefficients (options + pairs,) of one sum."""
    forest, first, multi = problem.forest, variables.first, variables.multi
    unary = cost.unary.copy()
    edges = np.arange(len(forest.parent))
    up, down = multi[forest.parent], multi[forest.child]
    half = up & ~down
    parent = forest.parent[half]
    np.add.at(unary, parent, cost.pair[edges[half], :, first[forest.child[half]]])
    half = ~up & down
    child = forest.child[half]
    np.add.at(unary, child, cost.pair[edges[half], first[forest.parent[half]], :])
    settled = ~up & ~down
    ends = first[forest.parent[settled]], first[forest.child[settled]]
    constant = cost.pair[edges[settled], *ends].sum()
    constant += unary[~multi, first[~multi]].sum()
    pairs = cost.pair[variables.edge, variables.upper, variables.lower]
    return float(constant), np.concatenate(
        [unary[variables.group, variables.place], pairs]
    )


def _structure(problem: Problem, variables: _Variables) -> list[LinearConstraint]:
    """One option from each group; pairs add up to the options at both of their ends."""
    options = len(variables.group)
    columns = np.arange(options)
    _, row = np.unique(variables.group, return_inverse=True)
    one_each = csr_array(
        (np.ones(options), (row, columns)), shape=(row.max() + 1, variables.count + 1)
    )
    rows = [LinearConstraint(one_each, 1, 1)]
    if len(variables.edge):
        pairs = options + np.arange(len(variables.edge))
        for ends, places in (
            (problem.forest.parent, variables.upper),
            (problem.forest.child, variables.lower),
        ):
            option = variables.number[ends[variables.edge], places]
            key = variables.edge * (options + 1) + option
            unique, start, row = np.unique(key, return_index=True, return_inverse=True)
            left = coo_array(
                (np.ones(len(row)), (row, pairs)), (len(unique), variables.count + 1)
            )
            right = coo_array(
                (np.ones(len(unique)), (np.arange(len(unique)), option[start])),
                (len(unique), variables.count + 1),
            )
            rows.append(LinearConstraint((left - right).tocsr(), 0, 0))
    return rows


def _stretch(values: Values, variables: _Variables, spread: float) -> float:
    """Return the factor that brings the sums of a row to 0..spread."""
    options = values[: len(variables.group)]
    worst = 0.0
    for part, owner in (
        (options, variables.group),
        (values[len(options) :], variables.edge),
    ):
        if len(part):
            starts = np.flatnonzero(np.diff(owner, prepend=-1))
            high = np.maximum.reduceat(part, starts)
            worst += float((high - np.minimum.reduceat(part, starts)).sum())
    return spread / worst if worst > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Near:
    """When branch and bound may stop before it is done."""

    gap: float  # relative to the objective of the whole stack
    offset: float  # what that has beside what is minimized
    nodes: int


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The best stack that was found, and what no stack goes below."""

    places: Places
    bound: float  # in units of the objective


def minimize(
    problem: Problem,
    cost: Priced,
    limits: Sequence[tuple[Priced, float]],
    meets: Limits,
    free: Free,
    near: "Near | None" = None,
) -> Answer | None:
    """Return the cheapest stack of `free` options within limits; None: there is none.

    `limits` are rows above `problem.least` with their room, `meets` the same limits
    as absolute sums. `near` is when to stop early: the answer's bound then says how
    good it is, and None may also mean that nothing was found in time.
    """
    variables = _variables(problem, free)
    constant, objective = _row(problem, variables, cost)
    if not len(variables.group):
        places = variables.first
        return Answer(places, constant) if problem.meets(places, meets) else None
    stretch = _stretch(objective, variables, _OBJECTIVE_SPREAD) or 1.0
    # The last variable is always 1 and carries what HiGHS's gap is relative to.
    whole = constant + near.offset if near else 0.0
    objective = np.append(objective, whole) * stretch
    rows = [*_structure(problem, variables), *_limits(problem, variables, limits)]
    while True:
        answer = _solve(objective, len(variables.group), rows, near)
        if answer is None:
            return None
        x, bound = answer
        places = variables.places(x)
        if problem.meets(places, meets):
            return Answer(places, bound / stretch - whole + constant)
        # It broke a limit by less than HiGHS sees: everything but this stack.
        same = np.zeros(variables.count + 1)
        same[: len(variables.group)] = variables.place == places[variables.group]
        most = int(variables.multi.sum()) - 1
        rows.append(LinearConstraint(same[None, :], -np.inf, most))


def _limits(
    problem: Problem, variables: _Variables, limits: Sequence[tuple[Priced, float]]
) -> list[LinearConstraint]:
    rows = []
    for priced, room in limits:
        settled, row = _row(problem, variables, priced)
        factor = 1.0 / (np.abs(row).max() or 1.0)
        row = np.append(row, 0.0)[None, :] * factor
        rows.append(LinearConstraint(row, -np.inf, (room - settled) * factor))
    return rows


def _solve(
    objective: Values, options: int, rows: list[LinearConstraint], near: Near | None
) -> tuple[Values, float] | None:
    """Return the solution and the bound; None: there is none (or not in time)."""
    integral = np.zeros(len(objective), dtype=int)
    integral[:options] = 1  # pairs follow
    low = np.zeros(len(objective))
    low[-1] = 1.0
    with stdout_without(b"Highs"):
        answer = milp(
            objective,
            integrality=integral,
            bounds=Bounds(low, np.ones(len(objective))),
            constraints=rows,
            options={"mip_rel_gap": 0.0}
            if near is None
            else {"mip_rel_gap": near.gap, "node_limit": near.nodes},
        )
    if answer.x is None:
        return None
    return answer.x, float(answer.mip_dual_bound)
