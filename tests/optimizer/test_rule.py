import itertools
from collections.abc import Sequence
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
from optimizer.plan import as_good_as
from optimizer.reasons import would_meet
from optimizer.spec import LatencySla, OptimizeSpec
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


def measured(
    plan: planning.Plan, some: Chooser, times: dict[str, float] | None = None
) -> dict[str, float]:
    """What was predicted of every stack, times a factor by label."""
    return {
        label: some.totals(stack).kl_nats * (times or {}).get(label, 1.0)
        for label, stack in plan.stacks.items()
    }


def decide(
    some: Chooser, sla: LatencySla, times: dict[str, float] | None = None
) -> tuple[Stack, str]:
    plan = planning.make(some, replace(SPEC, latency_sla=sla))
    label, outcome = planning.choose(plan, some, measured(plan, some, times))
    return plan.stacks[label], outcome


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


def test_what_measures_worse_than_16_bits_is_not_as_good_as_predicted() -> None:
    some = chooser(free_at_ffn_in)
    thrice = {f"as_good_{i}": 3.0 for i in range(2)}
    stack, outcome = decide(some, NO_TARGET, thrice)
    assert stack.choices == some.base()[1].choices
    assert outcome == "no_improvement"


def test_what_is_chosen_is_on_the_front_and_what_was_to_beat_it_is_withdrawn() -> None:
    some = chooser(free_at_ffn_in)
    plan = planning.make(some, SPEC)
    front = plan.front_with(plan.base, some)
    assert plan.stacks[plan.base] not in plan.front  # FP8 in ffn_in should beat it
    assert plan.stacks[plan.base] in front
    points = np.array([planning._objectives(some, stack) for stack in front])
    assert pareto_mask(points).all()
    assert plan.front_with("as_good_0", some) == plan.front


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
    assert said == [f"latency_sla.per_token_s of {totals.per_token_s:.3g} s or more"]


def test_a_first_token_that_is_too_late_is_named_too() -> None:
    sla = LatencySla(per_token_s=1e-9, first_token_s=1e-9)
    some = chooser()
    nearest = some.totals(some.nearest(sla))
    assert would_meet(some, nearest, replace(SPEC, latency_sla=sla)) == [
        f"latency_sla.per_token_s of {nearest.per_token_s:.3g} s or more",
        f"latency_sla.first_token_s of {nearest.first_token_s:.3g} s or more",
    ]


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


def test_as_good_as_stays_within_the_targets_the_loss_and_the_size() -> None:
    some = chooser(free_at_ffn_in)
    base = some.totals(some.base()[1])
    for sla in (NO_TARGET, LatencySla(first_token_s=base.first_token_s)):
        for stack in as_good_as(some, sla, base):
            totals = some.totals(stack)
            assert totals.meets(sla)
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
    assert planning._quickest(by_size, stacks) == taken  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_measurements_that_never_agree_still_end_in_a_measured_answer(
    share: float,
) -> None:
    some = chooser()
    base, fast = some.totals(some.base()[1]), some.totals(some.nearest(IMPOSSIBLE))
    target = base.per_token_s * (1 - share) + fast.per_token_s * share
    spec = replace(SPEC, latency_sla=LatencySla(per_token_s=target))
    done = itertools.count(1)

    def measure(stacks: Sequence[Stack]) -> list[tuple[float, float, float]]:
        kl = [some.totals(s).kl_nats * (7.0 if next(done) % 2 else 0.1) for s in stacks]
        return [(k, k, k) for k in kl]

    found = planning.settle(some, spec, measure)
    assert found.plan.contenders
    assert len(found.repair.measured) <= planning.MEASUREMENTS
    known = {k: found.repair.known(s) for k, s in found.plan.stacks.items()}
    kl = {k: one.kl_nats for k, one in known.items() if one}
    assert kl.keys() == known.keys()
    label, _ = planning.choose(found.plan, found.chooser, kl)
    assert label in found.plan.contenders


def test_what_the_budget_does_not_reach_is_not_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some = chooser()
    label, base = some.base()
    others = itertools.cycle(s for s in some.front() if s.choices != base.choices)

    def another(_: Chooser, __: OptimizeSpec) -> planning.Plan:
        stacks = {label: base, "least_loss": next(others)}
        return planning.Plan(label, stacks, ("least_loss",), True, [*stacks.values()])

    monkeypatch.setattr(planning, "make", another)
    monkeypatch.setattr(planning, "MEASUREMENTS", 3)  # both baselines and one more
    found = planning.settle(some, SPEC, lambda stacks: [(9.0, 9.0, 9.0)] * len(stacks))
    assert found.plan.contenders == ("least_loss",)
    assert found.repair.known(found.plan.stacks["least_loss"])
