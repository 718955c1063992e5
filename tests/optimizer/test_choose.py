import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from optimizer import run
from optimizer.choose import (
    Chooser,
    CostOf,
    Row,
    Totals,
    allowed,
    as_good_as,
    candidates,
    fp8_share,
    modelled,
    tabulate,
    why_high,
    would_meet,
)
from optimizer.cost import SiteCost, stack_cost
from optimizer.hardware import device
from optimizer.sensitivity import Sensitivity
from optimizer.spec import LatencySla, OptimizeSpec, Workload
from optimizer.stack import (
    CHOICES,
    WHOLE_MODEL,
    Choice,
    Component,
    ModelShape,
    Site,
    SiteShape,
    Stack,
    choice_named,
)
from optimizer.validate import Interval, Quality, Validation

OUT, FFN, DOWN = (
    Site(0, c) for c in (Component.ATTN_OUT, Component.FFN_IN, Component.FFN_OUT)
)
NORMS = Site(0, Component.NORMS)
EMBEDDINGS, HEAD = (
    Site(WHOLE_MODEL, c) for c in (Component.EMBEDDINGS, Component.LM_HEAD)
)
MATRICES = (OUT, FFN, DOWN)
BATCH = Workload(batch_size=16, prompt_tokens=512, output_tokens=128)
SPEC = OptimizeSpec("toy", "toy", "0" * 64, "l4", workload=BATCH)
NO_TARGET = LatencySla()
IMPOSSIBLE = LatencySla(per_token_s=1e-9)
ROOM = 10**12  # bytes: more than anything here needs

Loss = Callable[[Site, Choice], float]


def toy(*, tied: bool = True) -> ModelShape:
    """One layer of width 4096, without attention, wide enough for FP8 to pay."""
    table = 1600 * 4096
    sites = (
        SiteShape(EMBEDDINGS, 1600, 4096, table),
        SiteShape(OUT, 4096, 4096, 4096 * 4096, parts=(4096,)),
        SiteShape(FFN, 16384, 4096, 16384 * 4096, parts=(8192, 8192)),
        SiteShape(DOWN, 4096, 8192, 4096 * 8192, parts=(4096,)),
        SiteShape(NORMS, elements=2 * 4096),
        SiteShape(HEAD, 1600, 4096, table, parts=(1600,)),
    )
    return ModelShape(
        architecture="Toy",
        layers=1,
        hidden=4096,
        vocab=1600,
        max_context=2048,
        parameters=sum(s.weight_elements for s in sites) - (table if tied else 0),
        stored_bytes=0,
        tied_embeddings=tied,
        sites=sites,
    )


NATS = {"fp32": 0.0, "fp16": 1e-6, "bf16": 1e-5}


def usual(site: Site, choice: Choice) -> float:
    """FP8 loses 100 times as much as bf16, and e5m2 four times as much as e4m3."""
    narrow = {"fp8_e4m3_token": 5e-4, "fp8_e4m3_weight_only": 3e-4, "fp8_e5m2": 4e-3}
    return NATS.get(choice.name) or narrow.get(choice.name, 1e-3) * choice.is_fp8


def chooser(
    loss: Loss = usual,
    *,
    spec: OptimizeSpec = SPEC,
    shape: ModelShape | None = None,
    cost_of: CostOf | None = None,
    max_bytes: int = ROOM,
    overflowing: dict[Site, float] | None = None,
) -> Chooser:
    shape = shape or toy()
    target = device(spec.hardware)
    verdicts = allowed(shape, target, spec, overflowing or {})
    losses = {
        (site, c): Sensitivity(loss(site, c), 30.0, 0.0, 0.0)
        for site, some in candidates(verdicts).items()
        for c in some
    }
    cost_of = cost_of or modelled(shape, target, spec.workload)
    return Chooser(shape, tabulate(shape, verdicts, losses, cost_of), max_bytes)


def named(**choices: str) -> Stack:
    """A stack from {component: choice name}."""
    sites = {s.component.value: s for s in (EMBEDDINGS, OUT, FFN, DOWN, NORMS, HEAD)}
    return Stack.from_json({str(sites[k]): v for k, v in choices.items()})


def picked(stack: Stack) -> dict[str, str]:
    return {str(s): c.name for s, c in stack.choices.items()}


# Sums


@pytest.mark.parametrize("tied", [True, False])
def test_totals_are_the_costs_of_the_stack(tied: bool) -> None:
    shape = toy(tied=tied)
    some = chooser(shape=shape)
    usable = [
        [r.choice for r in rows if r.refused is None] for rows in some.table.values()
    ]
    every = list(itertools.product(*usable))
    for choices in every[:: max(1, len(every) // 200)]:
        stack = Stack(dict(zip(some.table, choices, strict=True)))
        want = stack_cost(shape, stack, device("l4"), BATCH)
        got = some.totals(stack)
        assert got.weight_bytes == want.weight_bytes
        assert got.memory_bytes == want.memory_bytes
        assert got.per_token_s == pytest.approx(want.per_token_s, rel=1e-12)
        assert got.first_token_s == pytest.approx(want.first_token_s, rel=1e-12)
        lost = sum(usual(s, c) for s, c in stack.choices.items())
        assert got.kl_nats == pytest.approx(lost, rel=1e-12)


@pytest.mark.parametrize("tied", [True, False])
def test_groups_add_up_to_the_totals_of_their_stack(tied: bool) -> None:
    some = chooser(shape=toy(tied=tied))
    for stack in some.front():
        picks = []
        for group in some.groups:
            wanted = tuple(stack.choices[s] for s in group.sites)
            picks.append(group.options[group.choices.index(wanted)])
        totals = some.totals(stack)
        assert sum(o.bytes for o in picks) == totals.memory_bytes
        assert math.fsum(o.kl_nats for o in picks) == pytest.approx(totals.kl_nats)
        seconds = math.fsum(o.per_token_s for o in picks)
        assert seconds == pytest.approx(totals.per_token_s, rel=1e-12)


def test_tied_ends_are_decided_together() -> None:
    tied, apart = chooser(), chooser(shape=toy(tied=False))
    assert sorted(map(len, (g.sites for g in tied.groups))) == [1, 1, 1, 1, 2]
    assert {len(g.sites) for g in apart.groups} == {1}
    (joint,) = (g for g in tied.groups if len(g.sites) == 2)
    assert joint.sites == (EMBEDDINGS, HEAD)
    table = 1600 * 4096
    held = {
        tuple(c.name for c in choices): option.bytes
        for choices, option in zip(joint.choices, joint.options, strict=True)
    }
    assert held["bf16", "bf16"] == 2 * table  # once
    assert held["bf16", "fp8_e4m3"] == 2 * table + table + 4  # apart: two tensors
    # Both per channel: one tensor of 8 bits with a scale for each of 1600 rows.
    assert held["fp8_e4m3", "fp8_e4m3_weight_only"] == table + 4 * 1600


# The front


def test_the_front_holds_no_stack_that_another_beats() -> None:
    some = chooser()
    totals = [some.totals(stack) for stack in some.front()]
    points = [(t.per_token_s, t.kl_nats, t.memory_bytes) for t in totals]
    assert len(points) >= 5
    assert points == sorted(points)
    for a, b in itertools.permutations(points, 2):
        assert not all(x <= y for x, y in zip(a, b, strict=True))


def test_the_front_fits_the_memory() -> None:
    free = chooser()
    sizes = [free.totals(s).memory_bytes for s in free.front()]
    limit = (min(sizes) + max(sizes)) // 2
    tight = chooser(max_bytes=limit)
    found = [tight.totals(s).memory_bytes for s in tight.front()]
    assert found
    assert max(found) <= limit


# The rule


def measured(
    plan: run.Plan, some: Chooser, times: dict[str, float] | None = None
) -> Validation:
    """A validation that finds what was predicted, times a factor by label."""

    def quality(label: str, stack: Stack) -> Quality:
        kl = some.totals(stack).kl_nats * (times or {}).get(label, 1.0)
        one = Interval(1.0, 1.0, 1.0)
        return Quality(Interval(kl, kl, kl), one, one, kl, kl)

    found = {k: quality(k, s) for k, s in plan.stacks.items()}
    return Validation(tokens=512, reference_perplexity=1.0, stacks=found)


def decide(
    some: Chooser, sla: LatencySla, times: dict[str, float] | None = None
) -> tuple[Stack, str]:
    plan = run._plan(some, replace(SPEC, latency_sla=sla))
    label, outcome = run.choose(plan, some, measured(plan, some, times))
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
    twice = {f"as_good_{i}": 2.0 for i in range(3)}
    stack, outcome = decide(some, NO_TARGET, twice)
    assert stack.choices == some.base()[1].choices
    assert outcome == "no_improvement"


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
        if t.per_token_s <= target
    ]
    assert totals.kl_nats == pytest.approx(min(losses), rel=1e-9)


def test_tighter_targets_lose_more_and_narrow_more() -> None:
    some = chooser()
    base, fast = some.totals(some.base()[1]), some.totals(some.nearest(IMPOSSIBLE))
    steps = [
        base.per_token_s * (1 - k / 4) + fast.per_token_s * k / 4 for k in range(5)
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


# Uniform stacks


def test_uniform_stacks_fall_back_to_16_bits() -> None:
    some = chooser()
    assert picked(some.uniform("fp8_e4m3")) == {
        "embeddings": "fp8_e4m3",
        "layers.0.attn_out": "fp8_e4m3",
        "layers.0.ffn_in": "fp8_e4m3",
        "layers.0.ffn_out": "fp8_e4m3",
        "layers.0.norms": "bf16",
        "lm_head": "fp8_e4m3",
    }
    assert some.base()[0] == "all_bf16"
    assert set(picked(some.base()[1]).values()) == {"bf16"}


@pytest.mark.parametrize(
    ("hardware", "base", "narrow"),
    [
        ("h100", "all_bf16", "all_e4m3"),
        ("mi300x", "all_bf16", "all_e4m3"),
        ("a100", "all_bf16", "all_e4m3_weight_only"),
        ("t4", "all_fp16", None),
        ("v100", "all_fp16", None),
    ],
)
def test_baselines_are_what_the_device_runs(
    hardware: str, base: str, narrow: str | None
) -> None:
    some = chooser(spec=replace(SPEC, hardware=hardware))
    label, stack = some.base()
    assert label == base
    assert set(picked(stack).values()) == {base.removeprefix("all_")}
    found = some.narrow()
    assert (found and found[0]) == narrow
    if found is not None:
        assert found[1].choices[FFN].is_fp8


@pytest.mark.parametrize("hardware", ["v100", "t4"])
def test_fp16_is_refused_where_values_overflow_it(hardware: str) -> None:
    # Case A12: 66246.39 is 66048 in bf16 and infinite in fp16.
    spec = replace(SPEC, hardware=hardware)
    some = chooser(spec=spec, overflowing={DOWN: 66246.39})
    (row,) = (r for r in some.table[DOWN] if r.choice.name == "fp16")
    assert row.refused == "values up to 6.625e+04 overflow fp16, which ends at 65504"
    assert row.sensitivity is None
    label, stack = some.base()
    assert label == "all_16bit"  # for not all of it is fp16
    names = picked(stack)
    assert names.pop("layers.0.ffn_out") == "fp32"
    assert set(names.values()) == {"fp16"}


def test_an_overflow_of_fp16_is_no_matter_where_bf16_is_native() -> None:
    some = chooser(overflowing={DOWN: 66246.39})
    assert some.base()[0] == "all_bf16"


@pytest.mark.parametrize("engine", ["vllm", "torchao"])
def test_an_engine_without_e5m2_gets_none(engine: str) -> None:
    some = chooser(spec=replace(SPEC, engine=engine, hardware="h100"))
    for stack in some.front():
        assert "fp8_e5m2" not in picked(stack).values()


def test_fp8_share_counts_the_elements_of_matrices() -> None:
    shape = toy(tied=False)
    bf16 = {
        s.component.value: "bf16" for s in (EMBEDDINGS, OUT, FFN, DOWN, NORMS, HEAD)
    }
    assert fp8_share(shape, named(**bf16)) == 0.0
    # ffn_in is 16384×4096 of 4096×4096 + 16384×4096 + 4096×8192 + 2 × 1600×4096.
    share = 16384 / (4096 + 16384 + 8192 + 2 * 1600)
    for name in ("fp8_e4m3", "fp8_e4m3_weight_only", "fp8_e5m2"):
        got = fp8_share(shape, named(**{**bf16, "ffn_in": name}))
        assert got == pytest.approx(share)


# Words


def row(
    name: str, *, kl: float = 0.0, us: float = 1.0, refused: str | None = None
) -> Row:
    choice = choice_named(Component.FFN_IN, name)
    if refused is not None:
        return Row(choice, refused, None, None)
    return Row(
        choice,
        None,
        Sensitivity(kl, 30.0, 0.0, 0.0),
        SiteCost(us * 1e-6, us * 1e-6, 0, 0),
    )


BF16 = choice_named(Component.FFN_IN, "bf16")


def test_why_high_says_what_refuses_fp8() -> None:
    rows = [row("bf16"), row("fp8_e4m3", refused="K = 24 is not a multiple of 16")]
    assert why_high(rows, BF16) == "FP8 is refused: K = 24 is not a multiple of 16"


def test_why_high_says_that_no_time_is_saved() -> None:
    rows = [row("bf16", us=10), row("fp8_e4m3", us=12.5)]
    assert why_high(rows, BF16) == (
        "FP8 saves no time: 12.5 µs as fp8_e4m3, 10 µs as bf16"
    )


def test_why_high_says_what_the_time_would_cost() -> None:
    rows = [
        row("bf16", us=10, kl=1e-5),
        row("fp8_e4m3", us=6, kl=0.01001),
        row("fp8_e4m3_token", us=8, kl=0.005),
    ]
    said = why_high(rows, BF16)
    assert said is not None
    assert said.startswith("fp8_e4m3 would save 4 µs per token and cost 0.01 nats")


def test_why_high_says_nothing_of_a_site_in_fp8() -> None:
    rows = [row("bf16", us=10), row("fp8_e4m3", us=6)]
    assert why_high(rows, choice_named(Component.FFN_IN, "fp8_e4m3")) is None


def test_why_high_says_where_fp8_does_not_exist() -> None:
    choice = choice_named(Component.NORMS, "bf16")
    rows = [Row(c, None, None, None) for c in CHOICES[Component.NORMS]]
    assert why_high(rows, choice) == "no FP8 choice exists for this kind of site"
