import itertools
import math
from dataclasses import replace

import pytest

from optimizer.choose import (
    Row,
    fp8_share,
)
from optimizer.cost import SiteCost, stack_cost
from optimizer.hardware import device
from optimizer.reasons import why_high
from optimizer.stack import (
    CHOICES,
    Component,
    Stack,
    choice_named,
)
from optimizer.sums import Sensitivity
from tests.optimizer.toy import (
    BATCH,
    DOWN,
    EMBEDDINGS,
    FFN,
    HEAD,
    NORMS,
    OUT,
    SPEC,
    chooser,
    named,
    picked,
    toy,
    usual,
)

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
        "FP8 saves no time: 12.5\u00a0µs as fp8_e4m3, 10.0\u00a0µs as bf16"
    )


def test_why_high_says_what_the_time_would_cost() -> None:
    rows = [
        row("bf16", us=10, kl=1e-5),
        row("fp8_e4m3", us=6, kl=0.01001),
        row("fp8_e4m3_token", us=8, kl=0.005),
    ]
    said = why_high(rows, BF16)
    assert said is not None
    assert said.startswith("fp8_e4m3 would save 4.00\u00a0µs per token for 0.01 nats")


def test_why_high_says_nothing_of_a_site_in_fp8() -> None:
    rows = [row("bf16", us=10), row("fp8_e4m3", us=6)]
    assert why_high(rows, choice_named(Component.FFN_IN, "fp8_e4m3")) is None


def test_why_high_says_where_fp8_does_not_exist() -> None:
    choice = choice_named(Component.NORMS, "bf16")
    rows = [Row(c, None, None, None) for c in CHOICES[Component.NORMS]]
    assert why_high(rows, choice) == "no FP8 choice exists for this kind of site"


def test_sites_of_one_switch_are_decided_alike() -> None:
    some = chooser()
    component = FFN.component
    every = tuple(sorted(s for s in some.table if s.component is component))
    alike = replace(some, as_one=(every,))
    (group,) = (g for g in alike.groups if FFN in g.sites)
    assert group.sites == every
    for choices in group.choices:
        assert len(set(choices)) == 1
    for stack in alike.front():
        assert (
            len({c for s, c in stack.choices.items() if s.component is component}) == 1
        )
