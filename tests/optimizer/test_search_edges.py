"""Casts between neighbors, large problems, and what is proven about an answer."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from optimizer import search
from optimizer.dual import Solver
from optimizer.knapsack import AXES, Priced, best, priced, problem, regrets
from optimizer.search import Edge, Edges, Groups, Option, Picks, front, solve, totals
from optimizer.stack import Component, choice_named

BF16 = choice_named(Component.FFN_IN, "bf16")
FRONT: tuple[search.Axis, ...] = ("kl_nats", "per_token_s", "bytes")
SEEDS = range(6)


def random_forest(seed: int) -> tuple[Groups, Edges]:
    """2 to 5 sites of 2 to 4 options; each but the first may hang on an earlier one."""
    rng = np.random.default_rng(seed)
    groups = [
        [
            Option(BF16, *rng.random(3).tolist(), int(rng.integers(1, 100)))
            for _ in range(rng.integers(2, 5))
        ]
        for _ in range(rng.integers(2, 6))
    ]
    edges = []
    for child in range(1, len(groups)):
        if rng.random() < 0.8:
            parent = int(rng.integers(child))
            ends = [parent, child] if rng.random() < 0.5 else [child, parent]
            shape = (len(groups[ends[0]]), len(groups[ends[1]]))
            casts = rng.normal(0.0, 0.5, (2, *shape))  # discounts are negative
            edges.append(Edge(*ends, *casts))
    return groups, edges


def everything(groups: Groups) -> list[Picks]:
    return list(product(*(range(len(g)) for g in groups)))


def least(
    groups: Groups, edges: Edges, axis: search.Axis, limits: search.Limits
) -> float | None:
    """By trying everything; None: nothing is within the limits."""
    sums = [totals(groups, p, edges) for p in everything(groups)]
    within = [s[axis] for s in sums if all(s[a] <= x for a, x in limits.items())]
    return min(within, default=None)


def test_casts_are_part_of_the_sums() -> None:
    groups = [[Option(BF16, 0.0, 1.0, 10.0, 1)], [Option(BF16, 0.0, 2.0, 20.0, 1)]]
    edge = Edge(0, 1, np.array([[0.25]]), np.array([[-0.5]]))
    sums = totals(groups, (0, 0), [edge])
    assert (sums["per_token_s"], sums["first_token_s"]) == (3.25, 29.5)


@pytest.mark.parametrize("small", [0, 10_000])
@given(seed=st.integers(0, 10**6), share=st.floats(0.1, 0.7))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_the_best_stack_with_casts_is_what_trying_everything_finds(
    small: int, seed: int, share: float
) -> None:
    # small=0 goes by prices and a core, 10,000 straight to branch and bound.
    groups, edges = random_forest(seed)
    seconds = [totals(groups, p, edges)["per_token_s"] for p in everything(groups)]
    sizes = [totals(groups, p, edges)["bytes"] for p in everything(groups)]
    limits: search.Limits = {
        "per_token_s": float(np.quantile(seconds, share)),
        "bytes": float(np.quantile(sizes, share)),
    }
    found = solve(
        groups,
        edges=edges,
        max_per_token_s=limits["per_token_s"],
        max_bytes=limits["bytes"],
        small=small,
    )
    want = least(groups, edges, "kl_nats", limits)
    if want is None:
        assert found is None
    else:
        assert found is not None
        sums = totals(groups, found, edges)
        assert all(sums[axis] <= limit for axis, limit in limits.items())
        assert sums["kl_nats"] == pytest.approx(want, rel=1e-3 if small == 0 else 1e-9)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_at_given_prices_the_best_stack_and_every_regret_are_exact(seed: int) -> None:
    groups, edges = random_forest(seed)
    layout = problem(groups, AXES, edges)
    prices = np.random.default_rng(seed).random(4)
    weighted: dict[search.Axis, float] = dict(zip(AXES, prices.tolist(), strict=True))
    cost = priced(layout, weighted)
    value, places = best(layout.forest, cost)
    kept = [np.flatnonzero(row).tolist() for row in layout.real]
    by_hand = {p: price_of(layout.sums(np.array(p)), prices) for p in product(*kept)}
    assert value == pytest.approx(min(by_hand.values()))
    assert by_hand[tuple(places.tolist())] == pytest.approx(value)
    for g, row in enumerate(regrets(layout.forest, cost)):
        for i in kept[g]:
            with_it = min(v for p, v in by_hand.items() if p[g] == i)
            assert row[i] == pytest.approx(with_it - value, abs=1e-9)


def price_of(sums: np.ndarray, prices: np.ndarray) -> float:
    return float(sums @ prices)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_point_of_a_front_with_casts_is_on_the_front(seed: int) -> None:
    groups, edges = random_forest(seed)
    sums = [totals(groups, p, edges) for p in everything(groups)]
    found = front(groups, points=40, edges=edges)
    assert found.epsilon == 0.0
    for picks in found.picks:
        mine = totals(groups, picks, edges)
        assert not any(
            all(s[a] <= mine[a] for a in FRONT) and any(s[a] < mine[a] for a in FRONT)
            for s in sums
        )


def test_a_lone_flip_that_costs_two_casts_disappears() -> None:
    # Three sites in a row, bf16 or fp16. At the middle one fp16 loses less and takes as
    # long, so without casts it is chosen; a cast on either side costs 2 s each.
    same = [Option(BF16, 0.0, 1.0, 0.0, 1), Option(BF16, 0.1, 1.0, 0.0, 1)]
    middle = [Option(BF16, 0.5, 1.0, 0.0, 1), Option(BF16, 0.2, 1.0, 0.0, 1)]
    groups = [same, middle, same]
    cast = np.array([[0.0, 2.0], [2.0, 0.0]])
    edges = [Edge(0, 1, cast, cast), Edge(1, 2, cast, cast)]
    assert solve(groups, max_per_token_s=3.0) == (0, 1, 0)
    assert solve(groups, max_per_token_s=3.0, edges=edges) == (1, 1, 1)
    assert solve(groups, max_per_token_s=7.0, edges=edges) == (0, 1, 0)


def test_an_option_that_only_a_cast_makes_worthwhile_is_kept() -> None:
    # Alone the second option is dominated; its neighbor pays 5 s less beside it.
    groups = [
        [Option(BF16, 0.0, 1.0, 0.0, 1), Option(BF16, 0.0, 2.0, 0.0, 1)],
        [Option(BF16, 0.0, 9.0, 0.0, 1)],
    ]
    discount = np.array([[0.0], [-5.0]])
    edges = [Edge(0, 1, discount, discount)]
    assert solve(groups, objective="per_token_s") == (0, 0)
    assert solve(groups, objective="per_token_s", edges=edges) == (1, 0)


def test_edges_between_the_same_two_sites_add_up() -> None:
    groups = [[Option(BF16, 0.0, 0.0, 0.0, 1), Option(BF16, 0.0, 1.0, 0.0, 1)]] * 2
    once = np.array([[0.0, 0.0], [0.0, -1.5]])
    other_way = np.array([[0.0, 0.0], [0.0, -1.0]])
    one, two = Edge(0, 1, once, once), Edge(1, 0, other_way, other_way)
    assert solve(groups, objective="per_token_s", edges=[one]) == (0, 0)
    assert solve(groups, objective="per_token_s", edges=[one, two]) == (1, 1)


def test_edges_that_close_a_circle_are_an_error() -> None:
    groups = [[Option(BF16, 0.0, 0.0, 0.0, 1), Option(BF16, 0.0, 1.0, 0.0, 1)]] * 3
    some = np.array([[0.0, 1.0], [1.0, 0.0]])
    edges = [Edge(a, b, some, some) for a, b in ((0, 1), (1, 2), (2, 0))]
    with pytest.raises(ValueError, match="close a circle"):
        solve(groups, edges=edges)


# Large


def large_groups(seed: int, count: int = 150, width: int = 5) -> Groups:
    rng = np.random.default_rng(seed)

    def option(scale: np.ndarray, bits: int) -> Option:
        kl, seconds, size = scale * rng.lognormal(0.0, 0.3, 3)
        return Option(
            BF16,
            float(kl * 2.0**-bits),
            float(seconds * bits),
            float(seconds * 50 * bits),
            int(size * bits),
        )

    scales = 10.0 ** rng.uniform([-4, -7, 4], [0, -5, 6], (count, 3))
    return [[option(s, b) for b in rng.permutation(32)[:width]] for s in scales]


@pytest.mark.parametrize("seed", range(3))
def test_a_gap_is_a_proof(seed: int) -> None:
    # What the answer by prices may have missed, branch and bound does not find either.
    groups = large_groups(seed)
    slow = totals(groups, solve(groups) or ())
    limit = slow["per_token_s"] * 0.3
    layout = problem(groups, ["kl_nats", "per_token_s", "bytes"])
    by_price = Solver(layout, small=0).minimize("kl_nats", {"per_token_s": limit})
    exact = Solver(layout, small=10**6).minimize("kl_nats", {"per_token_s": limit})
    assert by_price is not None
    assert exact is not None
    found, least_kl = (layout.totals(f.places)["kl_nats"] for f in (by_price, exact))
    assert exact.gap == 0.0
    assert by_price.gap <= 1e-3
    assert layout.totals(by_price.places)["per_token_s"] <= limit
    assert found * (1 - by_price.gap) <= least_kl * (1 + 1e-7)
    assert least_kl <= found * (1 + 1e-7)


def test_a_large_front_spreads_over_seconds_and_bytes_within_its_epsilon() -> None:
    groups = large_groups(7)
    found = front(groups, points=16)
    assert found.epsilon <= 2e-3
    points = np.array([[totals(groups, p)[a] for a in FRONT] for p in found.picks])
    assert len(points) >= 12
    # Not along one curve: where seconds grow, bytes shrink for some neighbors.
    steps = np.diff(points, axis=0)
    assert (steps[:, 2] < 0).any()
    assert (steps[:, 2] > 0).any()


def test_what_no_stack_meets_is_known_from_prices_alone() -> None:
    groups = large_groups(1)
    smallest = totals(groups, solve(groups, objective="bytes") or ())["bytes"]
    assert solve(groups, max_bytes=smallest * 0.999, small=0) is None
    assert solve(groups, max_bytes=smallest, small=0) is not None


def test_limits_that_no_stack_meets_together_are_found_out() -> None:
    # Either site may be fast or small, and both limits together need both at once.
    site = [Option(BF16, 0.0, 1.0, 0.0, 9), Option(BF16, 0.0, 9.0, 0.0, 1)]
    assert solve([site, site], max_per_token_s=3.0, small=0) == (0, 0)
    assert solve([site, site], max_per_token_s=3.0, max_bytes=3, small=0) is None
    assert solve([site, site], max_per_token_s=10.0, max_bytes=10, small=0) is not None


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    # HiGHS announces repairs on these, whatever its options say.
    groups = large_groups(3, count=40)
    front(groups, points=24)
    assert capfd.readouterr().out == ""


def test_padding_is_never_picked() -> None:
    groups = [
        [Option(BF16, 5.0, 1.0, 0.0, 1)],
        [Option(BF16, k, 2.0 - k, 0.0, 1) for k in (0.0, 0.5, 1.0)],
    ]
    layout = problem(groups, ["kl_nats", "per_token_s", "bytes"])
    cost = priced(layout, {"kl_nats": 1.0})
    assert isinstance(cost, Priced)
    assert np.isinf(cost.unary[0, 1:]).all()
    assert solve(groups, small=0) == (0, 0)
