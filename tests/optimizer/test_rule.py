import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from optimizer import plan as planning
from optimizer.choose import (
    Chooser,
    Totals,
    fp8_share,
)
from optimizer.pareto import pareto_mask
from optimizer.plan import Answer, as_good_as
from optimizer.reasons import would_meet
from optimizer.spec import LatencySla
from optimizer.stack import (
    Choice,
    Site,
    Stack,
)
from tests.optimizer.toy import (
    DOWN,
    FFN,
    IMPOSSIBLE,
    MATRICES,
    NATS,
    NO_TARGET,
    OUT,
    SPEC,
    chooser,
    usual,
)

Truth = Callable[[Stack], float]
Triple = tuple[float, float, float]


class Measure:
    """Measures the made-up truth, by default what is predicted; notes what it ran."""

    def __init__(self, some: Chooser, truth: Truth | None = None) -> None:
        self.truth = truth or (lambda stack: some.totals(stack).kl_nats)
        self.seen: list[Stack] = []

    def __call__(self, stacks: Sequence[Stack]) -> list[Triple]:
        self.seen += stacks
        return [(kl, kl * 0.98, kl * 1.02) for kl in map(self.truth, stacks)]


def decided(some: Chooser, sla: LatencySla, truth: Truth | None = None) -> Answer:
    return planning.answer(planning.measured_front(some, Measure(some, truth)), sla)


def decide(some: Chooser, sla: LatencySla) -> tuple[Stack, str]:
    found = decided(some, sla)
    return found.stack, found.outcome


def free_at_ffn_in(site: Site, choice: Choice) -> float:
    """FP8 in ffn_in loses no more than bf16; elsewhere as usual."""
    if site == FFN and choice.name == "fp8_e4m3":
        return NATS["bf16"]
    return usual(site, choice)


def test_of_stacks_as_good_as_16_bits_the_fastest_is_taken() -> None:
    some = chooser(free_at_ffn_in)
    stack, outcome = decide(some, NO_TARGET)
    assert outcome == "sla_met"
    assert stack.choices[FFN].name == "fp8_e4m3"
    assert {stack.choices[s].name for s in (OUT, DOWN)} == {"bf16"}
    base = some.totals(some.base()[1])
    totals = some.totals(stack)
    assert totals.kl_nats <= base.kl_nats
    assert totals.per_token_s < base.per_token_s
    assert totals.memory_bytes <= base.memory_bytes


def fp8_is_bad(some: Chooser) -> Truth:
    """Whatever is predicted, a stack with FP8 in it loses three times as much."""
    return lambda stack: (
        some.totals(stack).kl_nats
        * (3.0 if any(c.is_fp8 for c in stack.choices.values()) else 1.0)
    )


def test_what_measures_worse_than_16_bits_is_not_as_good_as_predicted() -> None:
    some = chooser(free_at_ffn_in)
    found = decided(some, NO_TARGET, fp8_is_bad(some))
    assert found.stack.choices == some.base()[1].choices
    assert found.outcome == "no_improvement"


def test_what_is_chosen_is_on_the_front_and_what_was_to_beat_it_is_withdrawn() -> None:
    some = chooser(free_at_ffn_in)
    front = planning.measured_front(some, Measure(some))
    base = some.base()[1]
    assert base not in front.stacks  # FP8 in ffn_in beats it
    found = planning._front_with(front, base)
    assert base in found
    points = np.array([planning._objectives(some, stack) for stack in found])
    assert pareto_mask(points).all()
    good = front.stacks[-1]
    assert planning._front_with(front, good) == front.stacks


def test_without_anything_to_gain_16_bits_stay() -> None:
    some = chooser(spec=replace(SPEC, formats=("bf16",)))
    stack, outcome = decide(some, NO_TARGET)
    assert {stack.choices[s].name for s in MATRICES} == {"bf16"}
    assert outcome == "no_improvement"


def test_a_tight_target_takes_the_least_loss_that_meets_it() -> None:
    some = chooser()
    base, fast = some.totals(some.base()[1]), some.totals(some.nearest(IMPOSSIBLE))
    target = (base.per_token_s + fast.per_token_s) / 2
    stack, outcome = decide(some, LatencySla(per_token_s=target))
    assert outcome == "sla_met"
    totals = some.totals(stack)
    assert totals.per_token_s <= target
    assert fp8_share(some.model, stack) > 0.0
    # By brute force over every stack of this model.
    usable = [[r for r in rows if r.refused is None] for rows in some.table.values()]
    losses = [
        t.kl_nats
        for rows in itertools.product(*usable)
        for t in [some._sum(iter(zip(some.table, rows, strict=True)))]
        if t.per_token_s <= target and t.memory_bytes <= base.memory_bytes
    ]
    assert totals.kl_nats == pytest.approx(min(losses), rel=1e-9)


def test_tighter_targets_lose_more_and_narrow_more() -> None:
    some = chooser()
    base, fast = some.totals(some.base()[1]), some.totals(some.nearest(IMPOSSIBLE))
    steps = [
        base.per_token_s * (1 - k / 2) + fast.per_token_s * k / 2 for k in range(3)
    ]
    found = [decide(some, LatencySla(per_token_s=s * (1 + 1e-9)))[0] for s in steps]
    lost = [some.totals(s).kl_nats for s in found]
    assert lost == sorted(lost)
    assert lost[0] < lost[-1]
    shares = [fp8_share(some.model, s) for s in found]
    assert shares[0] == 0.0
    assert shares[-1] > 0.9


def test_an_impossible_target_gets_the_fastest_and_what_would_meet_it() -> None:
    some = chooser()
    stack, outcome = decide(some, IMPOSSIBLE)
    assert outcome == "sla_not_met"
    totals = some.totals(stack)
    usable = [[r for r in rows if r.refused is None] for rows in some.table.values()]
    fastest = sum(min(r.cost.per_token_s for r in rows if r.cost) for rows in usable)
    assert totals.per_token_s == pytest.approx(fastest, rel=1e-9)
    said = would_meet(some, totals, replace(SPEC, latency_sla=IMPOSSIBLE))
    assert just(said) == [("per_token_s", pytest.approx(totals.per_token_s, rel=0.01))]
    assert just(said)[0][1] >= totals.per_token_s


def just(said: list[str]) -> list[tuple[str, float]]:
    """Return the targets that would be met, as numbers: whoever asks for them gets it."""
    pattern = r"latency_sla\.(\w+) of (\S+) s or more"
    return [(m[1], float(m[2])) for each in said if (m := re.fullmatch(pattern, each))]


def test_a_first_token_that_is_too_late_is_named_too() -> None:
    sla = LatencySla(per_token_s=1e-9, first_token_s=1e-9)
    some = chooser()
    nearest = some.totals(some.nearest(sla))
    said = would_meet(some, nearest, replace(SPEC, latency_sla=sla))
    assert [name for name, _ in just(said)] == ["per_token_s", "first_token_s"]
    for name, seconds in just(said):  # never rounded down
        assert getattr(nearest, name) <= seconds < 1.01 * getattr(nearest, name)


def test_other_hardware_that_is_fast_enough_is_named() -> None:
    some = chooser()
    nearest = some.totals(some.nearest(IMPOSSIBLE))
    sla = LatencySla(
        per_token_s=nearest.per_token_s / 3
    )  # an H100 has 11 times the bandwidth
    said = would_meet(some, nearest, replace(SPEC, latency_sla=sla))
    assert len(said) == 2
    assert said[1].startswith("other hardware (modelled): ")
    listed = said[1].removeprefix("other hardware (modelled): ").split(", ")
    assert "h100" in listed
    assert "l4" not in listed
    assert "t4" not in listed


def test_the_smallest_stack_is_nearest_where_memory_is_short() -> None:
    some = chooser(max_bytes=1)
    stack, outcome = decide(some, NO_TARGET)
    assert outcome == "sla_not_met"
    totals = some.totals(stack)
    smallest = min(chooser().totals(s).memory_bytes for s in chooser().front())
    assert totals.memory_bytes == smallest
    said = would_meet(some, totals, SPEC)
    assert said[0] == (
        f"{smallest / 1e9:.3g} GB of memory: the smallest stack needs that much"
    )


def test_the_target_that_nothing_meets_decides_what_is_nearest() -> None:
    some = chooser()
    impossible = LatencySla(per_token_s=1.0, first_token_s=1e-9)
    stack, outcome = decide(some, impossible)
    assert outcome == "sla_not_met"
    first = some.totals(some.nearest(LatencySla(first_token_s=1e-9))).first_token_s
    assert some.totals(stack).first_token_s == pytest.approx(first, rel=1e-9)


def test_as_good_as_stays_within_the_loss_and_the_size() -> None:
    some = chooser(free_at_ffn_in)
    base = some.totals(some.base()[1])
    found = as_good_as(some)
    assert found
    for stack in found:
        totals = some.totals(stack)
        assert totals.kl_nats <= base.kl_nats
        assert totals.memory_bytes <= base.memory_bytes


@pytest.mark.parametrize(
    ("sla", "met"),
    [
        (LatencySla(), True),
        (LatencySla(per_token_s=2.0), True),
        (LatencySla(per_token_s=1.9), False),
        (LatencySla(first_token_s=2.9), False),
        (LatencySla(per_token_s=2.0, first_token_s=3.0), True),
        (LatencySla(per_token_s=2.0, first_token_s=2.9), False),
    ],
)
def test_absent_targets_always_hold(sla: LatencySla, met: bool) -> None:
    assert Totals(0.0, 2.0, 3.0, 0, 0).meets(sla) is met


@pytest.mark.parametrize(
    ("large_us", "taken"),
    [(99.0, "small"), (97.0, "large")],  # 1 % faster is the same time, 3 % is not
)
def test_a_larger_stack_is_taken_only_where_it_buys_time(
    large_us: float, taken: str
) -> None:
    sizes = {
        "small": Totals(1e-3, 100e-6, 1e-3, 100, 0),
        "large": Totals(1e-4, large_us * 1e-6, 1e-3, 200, 0),
    }
    stacks = {label: Stack({Site(0, label): NATS}) for label in sizes}  # type: ignore[dict-item, arg-type]
    by_size = SimpleNamespace(totals=lambda s: sizes[next(iter(s.choices)).component])
    found = planning._quickest(by_size, list(stacks.values()))  # type: ignore[arg-type]
    assert found == stacks[taken]


# What is measured


def targets(some: Chooser) -> list[LatencySla]:
    """None, tighter and tighter ones, and one that nothing meets."""
    base, fast = some.totals(some.base()[1]), some.totals(some.nearest(IMPOSSIBLE))
    steps = [
        base.per_token_s * (1 - share) + fast.per_token_s * share
        for share in (0.2, 0.5, 0.8)
    ]
    return [NO_TARGET, *(LatencySla(per_token_s=s) for s in steps), IMPOSSIBLE]


def test_a_target_adds_one_stack_at_most_to_what_is_measured() -> None:
    some = chooser()
    whole = planning.measured_front(some, Measure(some))
    shared = list(whole.repair.stacks.values())
    assert len(shared) <= planning.FRONT_STACKS
    for sla in targets(some):
        measure = Measure(some)
        front = planning.measured_front(some, measure)
        found = planning.answer(front, sla)
        assert measure.seen[: len(shared)] == shared
        assert len(measure.seen) <= len(shared) + 1
        assert found.stack in measure.seen
        assert set(map(str, found.stacks.values())) == set(map(str, measure.seen))


def test_where_a_measured_stack_answers_the_target_nothing_is_added() -> None:
    some = chooser(free_at_ffn_in)
    front = planning.measured_front(some, Measure(some))
    assert planning.asked(front, NO_TARGET) is None
    # 16 bits are as good as 16 bits: what is slower and loses less is not asked for.
    plain = chooser()
    front = planning.measured_front(plain, Measure(plain, fp8_is_bad(plain)))
    assert planning.asked(front, NO_TARGET) is None


def test_a_first_token_target_asks_for_the_fastest_that_meets_it_too() -> None:
    # FP8 in ffn_in is free, and fast for each token; the target is on the first.
    some = chooser(free_at_ffn_in)
    front = planning.measured_front(some, Measure(some))
    quick = min(some.totals(s).first_token_s for s in front.stacks)
    sla = LatencySla(first_token_s=quick * (1 + 1e-9))
    found = planning.answer(front, sla)
    assert found.outcome == "sla_met"
    assert some.totals(found.stack).meets(sla)


def test_a_stack_that_measured_worse_than_another_within_the_target_is_not_chosen() -> (
    None
):
    some = chooser()
    sla = targets(some)[2]
    asked = planning.asked(planning.measured_front(some, Measure(some)), sla)
    assert asked is not None

    def truth(stack: Stack) -> float:
        return some.totals(stack).kl_nats * (100.0 if stack == asked else 1.0)

    found = decided(some, sla, truth)
    assert found.outcome == "sla_met"
    assert found.stack != asked
    assert some.totals(found.stack).meets(sla)


@pytest.mark.parametrize("at", range(5))
def test_measurements_that_never_agree_still_end_in_a_measured_answer(at: int) -> None:
    some = chooser()
    sla, done = targets(some)[at], itertools.count(1)

    def wild(stack: Stack) -> float:
        return some.totals(stack).kl_nats * (7.0 if next(done) % 2 else 0.1)

    measure = Measure(some, wild)
    front = planning.measured_front(some, measure)
    found = planning.answer(front, sla)
    assert len(measure.seen) <= planning.MEASUREMENTS
    assert found.stack in measure.seen
    assert found.stack in found.front
    assert front.repair.rounds <= planning.ROUNDS
