"""The loop of search and measurement, on a model whose true losses the test makes up."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from optimizer.choose import Chooser
from optimizer.repair import Repair, repair, step
from optimizer.spec import LatencySla
from optimizer.stack import Site, Stack, choice_named
from optimizer.surrogate import Measured, Surrogate
from tests.optimizer.toy import DOWN, FFN, MATRICES, NO_TARGET, OUT, chooser

Truth = Callable[[Stack], float]
Triple = tuple[float, float, float]


def measuring(truth: Truth, seen: list[Stack], width: float = 0.02) -> "Measure":
    return Measure(truth, seen, width)


class Measure:
    """Measures the made-up truth, and keeps what it was asked."""

    def __init__(self, truth: Truth, seen: list[Stack], width: float) -> None:
        self.truth, self.seen, self.width = truth, seen, width

    def __call__(self, stacks: Sequence[Stack]) -> list[Triple]:
        self.seen += stacks
        found = [self.truth(s) for s in stacks]
        return [(kl, kl * (1 - self.width), kl * (1 + self.width)) for kl in found]


def added(some: Chooser) -> Truth:
    return lambda stack: some.totals(stack).kl_nats


def names(stack: Stack) -> dict[str, str]:
    return stack.to_json()


# The chooser believes its surrogate


def test_a_chooser_predicts_and_budgets_as_it_was_taught() -> None:
    some = chooser()
    base = some.base()[1]
    law = Surrogate(a=2.0, b=1.5, multipliers={("ffn_in", "bf16"): 3.0})
    taught = replace(some, surrogate=law)
    plain = some.totals(base).kl_nats
    ffn = some.row(FFN, base.choices[FFN]).sensitivity
    assert ffn is not None
    want = 2.0 * (plain + 2 * ffn.kl_nats) ** 1.5
    assert taught.totals(base).kl_nats == pytest.approx(want)
    assert law.predict(taught.kl_sums(base)) == pytest.approx(want)
    # A budget is one of the taught prediction.
    found = taught.fastest(NO_TARGET, want, some.totals(base).memory_bytes)
    assert found is not None
    assert taught.totals(found).kl_nats <= want * (1 + 1e-9)
    assert taught.totals(found).per_token_s <= some.totals(base).per_token_s


def test_a_kind_that_weighs_more_is_narrowed_last() -> None:
    # Narrowing attn_out and ffn_out is fast enough, and so is ffn_in, the largest, alone.
    some = chooser()
    base = some.base()[1]
    name = "fp8_e4m3_weight_only"
    two = {s: choice_named(s.component, name) for s in (OUT, DOWN)}
    sla = LatencySla(some.totals(Stack({**base.choices, **two})).per_token_s)
    memory = some.totals(base).memory_bytes

    def narrowed(one: Chooser) -> set[Site]:
        found = one.least_loss(sla, memory)
        assert found is not None
        return {s for s, c in found.choices.items() if s in MATRICES and c.is_fp8}

    assert narrowed(some) == {FFN}
    heavy = {
        ("ffn_in", r.choice.name): 50.0 for r in some.table[FFN] if r.choice.is_fp8
    }
    taught = replace(some, surrogate=Surrogate(multipliers=heavy))
    assert narrowed(taught) == {OUT, DOWN}


# The loop


def test_what_adds_up_agrees_at_once() -> None:
    some, seen = chooser(), list[Stack]()
    state = repair(some, measuring(added(some), seen), budget=50, per_round=5)
    assert state.agrees
    assert state.rounds == 1
    assert len(seen) == len(state.measured) == 5
    ends = some.front()
    assert names(ends[0]) in map(names, seen)
    assert names(ends[-1]) in map(names, seen)


def test_what_grows_faster_than_the_sum_is_learned() -> None:
    some, seen = chooser(), list[Stack]()
    plain = added(some)
    state = repair(
        some, measuring(lambda s: 3.0 * plain(s) ** 1.05, seen, 0.05), budget=50
    )
    assert state.agrees
    assert state.rounds == 2
    for stack in state.chooser.front():
        want = 3.0 * plain(stack) ** 1.05
        assert state.chooser.totals(stack).kl_nats == pytest.approx(want, rel=0.05)


def test_the_budget_and_the_rounds_are_kept() -> None:
    some, seen = chooser(), list[Stack]()
    plain = added(some)

    def wild(stack: Stack) -> float:
        return plain(stack) * (1 + len(set(names(stack).values())))

    state = repair(some, measuring(wild, seen, 1e-6), budget=7, per_round=4)
    assert len(seen) == 7
    assert state.left == 0
    assert not state.agrees
    assert step(state, 4) == []  # nothing is left to measure with
    few = repair(some, measuring(wild, [], 1e-6), budget=100, per_round=2, rounds=3)
    assert few.rounds == 3
    assert len(few.measured) <= 6


def test_nothing_is_measured_twice_and_everything_repeats() -> None:
    some = chooser()
    plain = added(some)
    runs = []
    for _ in range(2):
        seen: list[Stack] = []
        state = repair(
            some, measuring(lambda s: 2 * plain(s), seen, 1e-6), budget=30, per_round=4
        )
        state.add(seen)
        assert len({tuple(names(s).items()) for s in seen}) == len(seen)
        runs.append([names(s) for s in seen])
    assert runs[0] == runs[1]


def test_the_measured_front_has_nothing_that_measured_worse() -> None:
    some, seen = chooser(), list[Stack]()
    plain = added(some)
    state = repair(some, measuring(plain, seen), budget=20)
    assert Repair(some, measuring(plain, []), 3).front() == []
    front = state.front()
    seconds = [some.totals(s).per_token_s for s in front]
    assert seconds == sorted(seconds)
    # The same stacks, one of them measured to lose more than any other: it leaves.
    worst = front[len(front) // 2]
    key = tuple(names(worst).values())
    state.measured[key] = Measured(9.0, 9.0, 9.0)
    assert names(worst) not in map(names, state.front())
