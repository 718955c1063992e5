from itertools import product

import numpy as np
import pytest

from optimizer.knapsack import undominated
from optimizer.pareto import pareto_mask
from optimizer.search import (
    Axis,
    Groups,
    Option,
    Picks,
    front,
    nearest,
    solve,
    totals,
)
from optimizer.stack import Component, choice_named

BF16 = choice_named(Component.FFN_IN, "bf16")
FRONT: tuple[Axis, ...] = ("kl_nats", "per_token_s", "bytes")
SEEDS = range(8)


def option(
    kl_nats: float, per_token_s: float, size: int, first_token_s: float = 0.0
) -> Option:
    return Option(BF16, kl_nats, per_token_s, first_token_s, size)


def random_groups(seed: int) -> Groups:
    """Up to 6 sites of 3 or 4 options; in half of the cases two sites cost the same."""
    rng = np.random.default_rng(seed)
    groups = []
    for _ in range(rng.integers(2, 7)):
        seconds = rng.random(rng.integers(3, 5)) * 10.0 ** rng.uniform(-6, -4)
        sizes = rng.integers(1, 10**9, len(seconds))
        groups.append([(float(s), int(b)) for s, b in zip(seconds, sizes, strict=True)])
    if seed % 2:
        groups[1] = groups[0]
    return [
        [option(float(rng.random()) ** 3, s, b, 50 * s + 1e-9 * b) for s, b in group]
        for group in groups
    ]


def everything(groups: Groups) -> list[Picks]:
    return list(product(*(range(len(g)) for g in groups)))


def least(groups: Groups, picks: list[Picks], axis: Axis) -> float:
    return min(totals(groups, p)[axis] for p in picks)


def middle(groups: Groups, axis: Axis, share: float) -> float:
    """Return a limit between the least and the greatest sum."""
    low = sum(min(getattr(o, axis) for o in g) for g in groups)
    high = sum(max(getattr(o, axis) for o in g) for g in groups)
    return float(low + share * (high - low))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("share", [0.1, 0.4])
def test_solve_finds_what_trying_everything_finds(seed: int, share: float) -> None:
    groups = random_groups(seed)
    seconds, size = (middle(groups, a, share) for a in ("per_token_s", "bytes"))
    within = [
        p
        for p in everything(groups)
        if totals(groups, p)["per_token_s"] <= seconds
        and totals(groups, p)["bytes"] <= size
    ]
    found = solve(groups, max_per_token_s=seconds, max_bytes=size)
    if not within:
        assert found is None
    else:
        assert found in within
        assert totals(groups, found)["kl_nats"] == least(groups, within, "kl_nats")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("objective", ["per_token_s", "first_token_s", "bytes"])
def test_any_axis_can_be_the_objective(seed: int, objective: Axis) -> None:
    groups = random_groups(seed)
    limit = middle(groups, "first_token_s", 0.3)
    within = [
        p for p in everything(groups) if totals(groups, p)["first_token_s"] <= limit
    ]
    found = solve(groups, max_first_token_s=limit, objective=objective)
    assert within
    assert found in within
    assert totals(groups, found)[objective] == pytest.approx(
        least(groups, within, objective), rel=1e-12
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_the_fastest_stack_within_a_loss(seed: int) -> None:
    groups = random_groups(seed)
    limit = middle(groups, "kl_nats", 0.3)
    within = [p for p in everything(groups) if totals(groups, p)["kl_nats"] <= limit]
    found = solve(groups, max_kl_nats=limit, objective="per_token_s")
    assert found in within
    assert totals(groups, found)["per_token_s"] == pytest.approx(
        least(groups, within, "per_token_s"), rel=1e-12
    )


def table(groups: Groups, picks: list[Picks]) -> np.ndarray:
    return np.array([[totals(groups, p)[a] for a in FRONT] for p in picks])


@pytest.mark.parametrize("seed", SEEDS)
def test_every_point_of_the_front_is_on_the_front(seed: int) -> None:
    groups = random_groups(seed)
    every = everything(groups)
    points = table(groups, every)
    best = {p for p, on in zip(every, pareto_mask(points), strict=True) if on}
    found = front(groups, points=12).picks
    assert set(found) <= best
    assert len(set(found)) == len(found) <= 12
    seconds = [totals(groups, p)["per_token_s"] for p in found]
    assert seconds == sorted(seconds)
    # And its ends are the ends of the whole front.
    for column, axis in enumerate(FRONT):
        assert least(groups, found, axis) == points[:, column].min()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_front_stays_within_its_limits(seed: int) -> None:
    groups = random_groups(seed)
    seconds, size = (middle(groups, a, 0.5) for a in ("per_token_s", "bytes"))
    every = [
        p
        for p in everything(groups)
        if totals(groups, p)["per_token_s"] <= seconds
        and totals(groups, p)["bytes"] <= size
    ]
    found = front(groups, points=8, max_per_token_s=seconds, max_bytes=size).picks
    mask = pareto_mask(table(groups, every)) if every else np.zeros(0, bool)
    assert set(found) <= {p for p, on in zip(every, mask, strict=True) if on}
    assert bool(found) == bool(every)


@pytest.mark.parametrize("seed", SEEDS)
def test_pruning_drops_no_point_of_the_front(seed: int) -> None:
    groups = random_groups(seed)
    every = everything(groups)
    kept = [undominated(g, FRONT) for g in groups]
    for picks, on in zip(every, pareto_mask(table(groups, every)), strict=True):
        assert not on or all(i in k for i, k in zip(picks, kept, strict=True))


def test_equal_options_are_one_option() -> None:
    twice = [option(1.0, 2.0, 3), option(1.0, 2.0, 3), option(2.0, 3.0, 4)]
    assert undominated(twice, FRONT) == [0]


def test_microseconds_are_told_apart() -> None:
    # 1 µs beside a second: the limit lets exactly one of the two be exact.
    slow = [option(0.0, 1.0, 1), option(0.5, 0.5, 1)]
    fine = [option(0.0, 2e-6, 1), option(1e-9, 1e-6, 1)]
    assert solve([slow, fine], max_per_token_s=1.0 + 1.5e-6) == (0, 1)
    assert solve([slow, fine], max_per_token_s=1.0 + 2.0e-6) == (0, 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_limit_is_kept_beyond_the_solver_s_tolerance(seed: int) -> None:
    # The best stack breaks the limit by a billionth, which HiGHS itself lets pass.
    groups = random_groups(seed)
    best = solve(groups, max_per_token_s=middle(groups, "per_token_s", 0.3))
    assert best is not None
    limit = totals(groups, best)["per_token_s"] * (1 - 1e-9)
    within = [
        p for p in everything(groups) if totals(groups, p)["per_token_s"] <= limit
    ]
    found = solve(groups, max_per_token_s=limit)
    assert (found is None) == (not within)
    if found is not None:
        assert found in within
        assert totals(groups, found)["kl_nats"] == least(groups, within, "kl_nats")


def test_adding_in_another_order_breaks_no_limit() -> None:
    # 0.1 + 0.2 + 0.3 is 0.6 in one order and 0.6000000000000001 in another.
    groups = [[option(0.0, t, 1), option(1.0, 0.0, 1)] for t in (0.1, 0.2, 0.3)]
    assert solve(groups, max_per_token_s=0.6) == (0, 0, 0)


def test_a_limit_on_what_never_varies() -> None:
    same = [[option(0.0, 1.0, 5), option(1.0, 0.5, 5)]]
    assert solve(same, max_bytes=5) == (0,)
    assert solve(same, max_bytes=4) is None
    assert front(same, max_bytes=4).picks == ()


def test_among_equal_losses_the_answer_is_the_best_of_the_rest() -> None:
    # Both pairs lose nothing at either end; seconds and bytes pull the same way.
    first = [option(0.0, 2.0, 1), option(0.5, 1.0, 9)]
    second = [option(0.5, 1.0, 1), option(0.0, 3.0, 2)]
    third = [option(0.0, 1.0, 100), option(0.0, 1.1, 1)]
    assert solve([first, second, third]) == (0, 1, 1)


def test_nearest_is_the_fastest_in_memory_at_its_least_loss() -> None:
    groups = [
        [option(0.0, 3.0, 4), option(1.0, 1.0, 2)],
        [option(0.0, 1.0, 4), option(0.5, 1.0, 2), option(0.2, 2.0, 1)],
    ]
    assert nearest(groups) == (1, 0)
    assert nearest(groups, max_bytes=4) == (1, 1)
    assert nearest(groups, max_bytes=1) == (1, 2)  # nothing is so small: the smallest
    assert nearest(groups, objective="kl_nats") == (0, 0)


def test_the_same_question_has_the_same_answer() -> None:
    groups = random_groups(3)
    assert front(groups, points=10) == front(groups, points=10)


def test_few_points_are_the_ends() -> None:
    groups = random_groups(3)
    found = front(groups, points=0).picks
    assert 2 <= len(found) <= 3
    assert set(found) <= set(front(groups, points=12).picks)


def test_one_site_with_one_option_is_a_front() -> None:
    assert front([[option(0.0, 1.0, 1)]]).picks == ((0,),)


def test_a_site_without_options_is_an_error() -> None:
    with pytest.raises(ValueError, match="group 1 has no options"):
        solve([[option(0.0, 1.0, 1)], []])


def test_a_model_of_many_equal_layers_is_solved_exactly() -> None:
    # 40 layers, one price list: every FP8 layer saves 1 s, so a limit of 20 s buys
    # the 20 cheapest losses. The arithmetic is a sort.
    losses = np.random.default_rng(0).random(40)
    groups = [[option(0.0, 1.0, 2), option(float(k), 0.0, 1)] for k in losses]
    found = solve(groups, max_per_token_s=20.0)
    assert found is not None
    assert sorted(np.flatnonzero(found)) == sorted(np.argsort(losses)[:20])
