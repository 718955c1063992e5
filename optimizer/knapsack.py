"""Sites, options and casts as arrays: their sums, and the best stack at given prices.

Loss, seconds and bytes add up over sites, and over the casts between neighbors. With a
price on each axis and no limit, the best stack follows site by site; where casts tie
neighbors together, tree by tree, by dynamic programming over all trees at once:

    h[site, option] = price of the option + Σ over children of
                      min over their options of (h[child, ·] + price of the cast)

The same messages, passed down again, tell what each option costs at best beside the
best stack: its regret.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from optimizer.pareto import pareto_mask
from optimizer.stack import Choice

Axis = Literal["kl_nats", "per_token_s", "first_token_s", "bytes"]
AXES: tuple[Axis, ...] = ("kl_nats", "per_token_s", "first_token_s", "bytes")
TIMED: tuple[Axis, ...] = ("per_token_s", "first_token_s")  # what casts cost
Picks = tuple[int, ...]  # an index into each group
Values = NDArray[np.float64]
Places = NDArray[np.intp]  # (groups,): columns of `Problem.columns`
Limits = dict[Axis, float]

SLACK = 1e-12  # relative: what adding in another order may change in a sum


@dataclass(frozen=True, slots=True)
class Option:
    """What one choice costs at one site; sites decided together are one option."""

    choice: Choice | tuple[Choice, ...]
    kl_nats: float
    per_token_s: float
    first_token_s: float
    bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """What two neighboring groups cost beside their own: casts, or their absence.

    Both matrices are (options of `left`, options of `right`) and may be negative.
    """

    left: int
    right: int
    per_token_s: Values
    first_token_s: Values


Groups = Sequence[Sequence[Option]]
Edges = Sequence[Edge]


def totals(groups: Groups, picks: Picks, edges: Edges = ()) -> dict[Axis, float]:
    """Return the sums of the picked options and the casts between them, exactly rounded."""
    chosen = [group[i] for group, i in zip(groups, picks, strict=True)]
    casts = [(e, picks[e.left], picks[e.right]) for e in edges]
    return {
        "kl_nats": math.fsum(o.kl_nats for o in chosen),
        "per_token_s": math.fsum(
            [
                *(o.per_token_s for o in chosen),
                *(e.per_token_s[i, j] for e, i, j in casts),
            ]
        ),
        "first_token_s": math.fsum(
            [
                *(o.first_token_s for o in chosen),
                *(e.first_token_s[i, j] for e, i, j in casts),
            ]
        ),
        "bytes": float(sum(o.bytes for o in chosen)),
    }


def undominated(
    group: Sequence[Option], axes: Sequence[Axis], casts: Values | None = None
) -> list[int]:
    """Indices of the options that some stack may need, the first of equal ones.

    `casts` (options, any) is what each option makes its neighbors pay.
    """
    points = np.array([[getattr(o, axis) for axis in axes] for o in group], float)
    if casts is not None:
        points = np.concatenate([points, casts], axis=1)
    _, first = np.unique(points, axis=0, return_index=True)
    first.sort()
    return [int(i) for i in first[pareto_mask(points[first])]]


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """The edges, each between a child and its parent, the deepest level last."""

    parent: Places  # (edges,)
    child: Places  # (edges,)
    levels: tuple[slice, ...]  # edges whose children are equally deep
    pairs: dict[Axis, Values]  # (edges, width, width): parent × child, least is 0


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """The knapsack over what pruning left, as arrays padded to the widest group."""

    groups: Groups
    edges: Edges
    index: Places  # (groups, width): where the option stands in its group
    real: NDArray[np.bool_]  # (groups, width): False is padding
    columns: dict[Axis, Values]  # (groups, width) above the group's least
    forest: Forest
    least: Limits  # sums that no stack goes below

    def spread(self, axis: Axis) -> float:
        """How far the sums of an axis may lie apart, at most."""
        pairs = self.forest.pairs.get(axis)
        most = 0.0 if pairs is None else float(pairs.max(axis=(1, 2)).sum())
        return float(self.columns[axis].max(axis=1).sum()) + most

    def picks(self, places: Places) -> Picks:
        """Return the indices of the options into the groups as they were given."""
        return tuple(self.index[np.arange(len(places)), places].tolist())

    def totals(self, places: Places) -> dict[Axis, float]:
        """Return the sums of a stack, exactly rounded."""
        return totals(self.groups, self.picks(places), self.edges)

    def sums(self, places: Places) -> Values:
        """Return the sums above `least`, an entry for each axis of `columns`."""
        rows = np.arange(len(places))
        return np.array([self._sum(axis, rows, places) for axis in self.columns])

    def _sum(self, axis: Axis, rows: Places, places: Places) -> float:
        total = float(self.columns[axis][rows, places].sum())
        if axis in self.forest.pairs:
            forest = self.forest
            edges = np.arange(len(forest.parent))
            ends = places[forest.parent], places[forest.child]
            total += float(forest.pairs[axis][edges, *ends].sum())
        return total

    def meets(self, places: Places, limits: Limits) -> bool:
        """Whether a stack is within limits, on exactly rounded sums."""
        reached = self.totals(places)
        return all(
            reached[axis] <= limit + SLACK * abs(limit)
            for axis, limit in limits.items()
        )


def problem(groups: Groups, axes: Sequence[Axis], edges: Edges = ()) -> Problem:
    """Prune the groups and lay them out.

    Raises ValueError for a group without options, and for edges that close a circle.
    """
    for position, options in enumerate(groups):
        if not options:
            raise ValueError(f"group {position} has no options")
    kept = _kept(groups, axes, edges)
    width = max((len(k) for k in kept), default=1)
    index = np.zeros((len(groups), width), dtype=np.intp)
    real = np.zeros((len(groups), width), dtype=bool)
    for g, k in enumerate(kept):
        index[g, : len(k)], real[g, : len(k)] = k, True
    columns: dict[Axis, Values] = {}
    least: Limits = {}
    for axis in axes:
        columns[axis] = np.zeros(index.shape)
        lows = []
        for g, k in enumerate(kept):
            values = np.array([getattr(groups[g][i], axis) for i in k], dtype=float)
            lows.append(values.min())
            columns[axis][g, : len(k)] = values - values.min()
        least[axis] = math.fsum(lows)
    forest = _forest(kept, width, [a for a in axes if a in TIMED], edges, least)
    return Problem(groups, edges, index, real, columns, forest, least)


def _kept(groups: Groups, axes: Sequence[Axis], edges: Edges) -> list[list[int]]:
    casts: dict[int, list[Values]] = defaultdict(list)
    for edge in edges:
        for axis in TIMED:
            if axis in axes:
                matrix: Values = getattr(edge, axis)
                casts[edge.left].append(matrix)
                casts[edge.right].append(matrix.T)
    return [
        undominated(group, axes, np.hstack(casts[g]) if g in casts else None)
        for g, group in enumerate(groups)
    ]


def _forest(
    kept: Sequence[Sequence[int]],
    width: int,
    axes: Sequence[Axis],
    edges: Edges,
    least: Limits,
) -> Forest:
    """Hang the edges below their roots, and add what every stack pays to `least`."""
    merged: dict[tuple[int, int], dict[Axis, Values]] = {}
    for edge in edges:
        rows, columns = kept[edge.left], kept[edge.right]
        ends = (edge.left, edge.right)
        for axis in axes:
            matrix: Values = getattr(edge, axis)[np.ix_(rows, columns)]
            _merge(merged, ends, axis, matrix)
    merged = {
        ends: some
        for ends, some in merged.items()
        if any(np.ptp(m) for m in some.values())
    }
    order, levels = _order(len(kept), list(merged))
    pairs: dict[Axis, Values] = {}
    for axis in axes if order else ():
        pairs[axis] = np.zeros((len(order), width, width))
        for e, (parent, child) in enumerate(order):
            some = merged.get((parent, child)) or {
                a: m.T for a, m in merged[child, parent].items()
            }
            low = float(some[axis].min())
            least[axis] += low
            shape = some[axis].shape
            pairs[axis][e, : shape[0], : shape[1]] = some[axis] - low
    ends_of = np.array(order, dtype=np.intp).reshape(-1, 2)
    return Forest(ends_of[:, 0], ends_of[:, 1], levels, pairs)


def _merge(
    merged: dict[tuple[int, int], dict[Axis, Values]],
    ends: tuple[int, int],
    axis: Axis,
    matrix: Values,
) -> None:
    """Add a matrix to the edge between two groups, whichever way round it is."""
    if (ends[1], ends[0]) in merged:
        ends, matrix = (ends[1], ends[0]), matrix.T
    some = merged.setdefault(ends, {})
    some[axis] = some[axis] + matrix if axis in some else matrix


def _order(
    count: int, ends: Sequence[tuple[int, int]]
) -> tuple[list[tuple[int, int]], tuple[slice, ...]]:
    """Return (parent, child) of every edge, level by level from the roots, and the levels."""
    beside: dict[int, list[int]] = defaultdict(list)
    for left, right in ends:
        beside[left].append(right)
        beside[right].append(left)
    depth: dict[int, int] = {}
    by_level: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for root in range(count):
        if root in depth or root not in beside:
            continue
        depth[root] = 0
        waiting = [(root, -1)]
        for node, above in waiting:
            for other in beside[node]:
                if other == above:
                    continue
                if other in depth:
                    raise ValueError(f"edges close a circle at group {other}")
                depth[other] = depth[node] + 1
                by_level[depth[other]].append((node, other))
                waiting.append((other, node))
    order: list[tuple[int, int]] = []
    levels: list[slice] = []
    for level in sorted(by_level):
        levels.append(slice(len(order), len(order) + len(by_level[level])))
        order += by_level[level]
    return order, tuple(levels)


@dataclass(frozen=True, slots=True, eq=False)
class Priced:
    """A problem with one number for everything: the sum over axes of price × amount."""

    unary: Values  # (groups, width); inf is padding
    pair: Values  # (edges, width, width)


def priced(problem: Problem, prices: Mapping[Axis, float]) -> Priced:
    """Return what every option and every cast costs at these prices."""
    unary = np.where(problem.real, 0.0, np.inf)
    pair = np.zeros((len(problem.forest.parent), *unary.shape[1:] * 2))
    for axis in problem.columns:  # in this order, so that sums are the same every time
        price = prices.get(axis, 0.0)
        if price:
            unary += price * problem.columns[axis]
            if axis in problem.forest.pairs:
                pair += price * problem.forest.pairs[axis]
    return Priced(unary, pair)


def _upward(forest: Forest, cost: Priced) -> tuple[Values, Values]:
    """Return h (groups, width) and the messages to the parents (edges, width)."""
    below = cost.unary.copy()
    messages = np.zeros((len(forest.parent), below.shape[1]))
    for level in reversed(forest.levels):
        options = cost.pair[level] + below[forest.child[level]][:, None, :]
        messages[level] = options.min(axis=2)
        np.add.at(below, forest.parent[level], messages[level])
    return below, messages


def _roots(forest: Forest, count: int) -> Places:
    return np.setdiff1d(np.arange(count), forest.child)


def best(forest: Forest, cost: Priced) -> tuple[float, Places]:
    """Return the least cost of any stack, and a stack that has it."""
    below, _ = _upward(forest, cost)
    places = below.argmin(axis=1)  # right for roots; children follow their parents
    for level in forest.levels:
        parent, child = forest.parent[level], forest.child[level]
        edges = np.arange(level.start, level.stop)
        options = cost.pair[edges, places[parent]] + below[child]
        places[child] = options.argmin(axis=1)
    roots = _roots(forest, len(below))
    return float(below[roots].min(axis=1).sum()), places


def regrets(forest: Forest, cost: Priced) -> Values:
    """Return (groups, width): what the best stack with an option costs above the best."""
    below, messages = _upward(forest, cost)
    regret = below - below.min(axis=1, keepdims=True)  # right for roots
    for level in forest.levels:
        parent, child = forest.parent[level], forest.child[level]
        above = (regret[parent] - messages[level])[:, :, None] + cost.pair[level]
        regret[child] = above.min(axis=1) + below[child]
    return regret
