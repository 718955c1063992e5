"""Exploring around a measured front, where the prediction has one site wrong."""

from collections.abc import Sequence

from optimizer.choose import Chooser
from optimizer.explore import explore
from optimizer.repair import Repair, stack_key, step
from optimizer.stack import Stack
from tests.optimizer.toy import OUT, chooser


def unfelt(some: Chooser, stack: Stack) -> float:
    """The predicted loss, but FP8 in attn_out loses next to nothing."""
    row = some.row(OUT, stack.choices[OUT])
    assert row.sensitivity is not None
    spared = 0.95 * row.sensitivity.kl_nats if stack.choices[OUT].is_fp8 else 0.0
    return some.totals(stack).kl_nats - spared


def started(budget: int) -> tuple[Repair, list[Stack]]:
    """A repair after one round of three stacks, and everything it measures."""
    some, seen = chooser(), list[Stack]()

    def measure(stacks: Sequence[Stack]) -> list[tuple[float, float, float]]:
        seen.extend(stacks)
        return [(unfelt(some, s),) * 3 for s in stacks]

    state = Repair(some, measure, budget)
    step(state, 3)
    return state, seen


def test_what_is_explored_is_new_and_within_the_budget() -> None:
    state, seen = started(10)
    found = explore(state, 4)
    assert len(found) == 4
    assert [stack_key(s) for s in seen[3:]] == [stack_key(s) for s in found]
    explore(state, 100)
    assert len(seen) == 10
    assert len({stack_key(s) for s in seen}) == 10
    assert explore(state, 4) == []


def test_exploring_lowers_the_front_where_the_prediction_was_wrong() -> None:
    state, _ = started(60)
    before = state.front()
    while state.left and explore(state, 8):
        pass
    some = state.chooser
    lower = [
        stack
        for stack in state.front()
        if stack.choices[OUT].is_fp8
        and any(
            unfelt(some, stack) < unfelt(some, old)
            and some.totals(stack).per_token_s <= some.totals(old).per_token_s
            for old in before
        )
    ]
    assert lower


def test_without_a_front_there_is_nothing_around_it() -> None:
    some = chooser()
    assert explore(Repair(some, lambda stacks: [], 5), 3) == []
