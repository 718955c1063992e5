"""Evaluates rules of Prometheus over recorded series: what the rules in deploy/ use.

A stand-in for `promtool test rules` where that is not installed; where it is, the test
runs both. Selectors look back five minutes, rates are of regular series.
"""

import math
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import promql_parser as promql

LOOKBACK_S = 300.0
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Points = list[tuple[float, float]]


def seconds(text: str) -> float:
    """5m -> 300."""
    parts = re.findall(r"(\d+)([smhd])", text)
    return float(sum(int(n) * UNITS_S[unit] for n, unit in parts))


def values(text: str) -> list[float]:
    """Read promtool's notation: `1x2 5` is 1 1 1 5, and `0+3x2` is 0 3 6."""
    found: list[float] = []
    for word in text.split():
        match = re.fullmatch(r"(-?[\d.]+)(?:([+-][\d.]+))?(?:x(\d+))?", word)
        assert match, word
        start, change, times = match.groups()
        count = int(times or 0) + 1
        found += [float(start) + i * float(change or 0) for i in range(count)]
    return found


@dataclass
class Store:
    """Series by their labels, `__name__` among them."""

    series: dict[Labels, Points] = field(default_factory=dict)

    def add(self, labels: Iterable[tuple[str, str]], at: float, value: float) -> None:
        self.series.setdefault(frozenset(labels), []).append((at, value))

    def select(self, selector: Any) -> dict[Labels, Points]:
        found = {}
        for labels, points in self.series.items():
            have = dict(labels)
            name_fits = selector.name in (None, have["__name__"])
            if name_fits and all(
                _fits(m, have.get(m.name, "")) for m in selector.matchers.matchers
            ):
                found[labels - {("__name__", have["__name__"])}] = points
        return found


def _fits(matcher: Any, value: str) -> bool:
    if matcher.op == promql.MatchOp.Equal:
        return value == matcher.value
    assert matcher.op == promql.MatchOp.NotEqual, matcher
    return value != matcher.value


def _rate(points: Points) -> float | None:
    if len(points) < 2:
        return None
    (begin, first), (end, last) = points[0], points[-1]
    return (last - first) / (end - begin)


OVER_TIME: dict[str, Callable[[Points], float | None]] = {
    "rate": _rate,
    "avg_over_time": lambda points: statistics.fmean(v for _, v in points),
    "stddev_over_time": lambda points: statistics.pstdev(v for _, v in points),
}
AGGREGATES: dict[str, Callable[[Iterable[float]], float]] = {"max": max, "sum": sum}
ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b if b else math.nan,
}


def evaluate(node: Any, store: Store, now: float) -> Vector | float:
    """Return the value of a parsed query at a time."""
    match node:
        case promql.NumberLiteral():
            return float(node.val)
        case promql.ParenExpr():
            return evaluate(node.expr, store, now)
        case promql.VectorSelector():
            return {
                labels: points[-1][1]
                for labels, all_points in store.select(node).items()
                if (points := _between(all_points, now - LOOKBACK_S, now))
            }
        case promql.Call():
            return _call(node, store, now)
        case promql.AggregateExpr():
            return _aggregate(node, _vector(node.expr, store, now))
        case promql.BinaryExpr():
            return _binary(node, store, now)
    raise AssertionError(f"not known here: {node}")


def _vector(node: Any, store: Store, now: float) -> Vector:
    found = evaluate(node, store, now)
    assert isinstance(found, dict), node
    return found


def _between(points: Points, begin: float, end: float) -> Points:
    return [(t, v) for t, v in points if begin <= t <= end]


def _call(node: Any, store: Store, now: float) -> Vector:
    if node.func.name == "vector":
        return {frozenset(): float(node.args[0].val)}
    matrix = node.args[0]
    begin = now - matrix.range.total_seconds()
    found = {}
    for labels, points in store.select(matrix.vector_selector).items():
        within = _between(points, begin, now)
        value = OVER_TIME[node.func.name](within) if within else None
        if value is not None:
            found[labels] = value
    return found


def _aggregate(node: Any, vector: Vector) -> Vector:
    by = set(node.modifier.labels)
    groups: dict[Labels, list[float]] = {}
    for labels, value in vector.items():
        key = frozenset((n, v) for n, v in labels if n in by)
        groups.setdefault(key, []).append(value)
    return {key: AGGREGATES[str(node.op)](found) for key, found in groups.items()}


def _binary(node: Any, store: Store, now: float) -> Vector:
    left, right = _vector(node.lhs, store, now), evaluate(node.rhs, store, now)
    on = node.modifier.matching if node.modifier else None
    found = {}
    for labels, value in left.items():
        other = right if isinstance(right, float) else _matched(labels, right, on)
        if other is None:
            continue
        if str(node.op) == ">":
            if value > other:
                found[labels] = value
        else:
            found[labels] = ARITHMETIC[str(node.op)](value, other)
    return found


def _matched(labels: Labels, right: Vector, on: Any) -> float | None:
    if on is None:
        return right.get(labels)
    key = frozenset((n, v) for n, v in labels if n in on.labels)
    return right.get(key) if key else next(iter(right.values()), None)


# Rules


@dataclass
class Rules:
    """The rules of a file, and what rang at each time."""

    rules: list[dict[str, Any]]
    since: dict[tuple[str, Labels], float] = field(default_factory=dict)

    def at(self, store: Store, now: float) -> dict[str, list[dict[str, str]]]:
        """Evaluate every rule once; return the labels of what rings, by alert."""
        ringing: dict[str, list[dict[str, str]]] = {}
        for rule in self.rules:
            found = _vector(promql.parse(rule["expr"]), store, now)
            more = rule.get("labels", {})
            if "record" in rule:
                for labels, value in found.items():
                    named = {**dict(labels), **more, "__name__": rule["record"]}
                    store.add(named.items(), now, value)
            else:
                ringing[rule["alert"]] = self._ringing(rule, found, now)
        return ringing

    def _ringing(
        self, rule: dict[str, Any], found: Vector, now: float
    ) -> list[dict[str, str]]:
        name = rule["alert"]
        active = {(name, labels) for labels in found}
        self.since = {
            key: self.since.get(key, now)
            for key in active | {k for k in self.since if k[0] != name}
        }
        wait = seconds(rule.get("for", "0s"))
        return [
            {**dict(labels), **rule["labels"]}
            for labels in found
            if now - self.since[name, labels] >= wait
        ]
