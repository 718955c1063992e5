from dataclasses import replace

import pytest

from optimizer.exact import exact
from optimizer.hybrid import doubtful, settled
from optimizer.pieces import Memory
from optimizer.spec import OptimizeSpec
from optimizer.stack import Choice, Component, Site, Stack, choice_named
from optimizer.sums import Sensitivities, Sensitivity
from optimizer.work import Work

FIRST, SECOND = Site(0, Component.FFN_IN), Site(1, Component.FFN_IN)
BF16, E4M3 = (choice_named(Component.FFN_IN, n) for n in ("bf16", "fp8_e4m3"))


def losses(*errors: float) -> Sensitivities:
    """Equal losses of the FP8 choices, with these standard errors."""
    found = {(s, BF16): Sensitivity(1e-5, 50.0, 0.0, 0.0) for s in (FIRST, SECOND)}
    for site, error in zip((FIRST, SECOND), errors, strict=True):
        found[site, E4M3] = Sensitivity(1e-3, 30.0, 0.0, 0.0, error)
    return found


def stacks(*choices: tuple[Choice, Choice]) -> list[Stack]:
    return [Stack({FIRST: a, SECOND: b}) for a, b in choices]


def test_a_certain_estimate_deserves_no_run() -> None:
    every = stacks((E4M3, BF16), (BF16, E4M3))
    assert doubtful(every, losses(1e-4, 1e-4)) == []


def test_an_uncertain_one_does_where_the_choice_hangs_on_it() -> None:
    every = stacks((E4M3, BF16), (BF16, E4M3))
    assert doubtful(every, losses(4e-4, 5e-4)) == [(SECOND, E4M3), (FIRST, E4M3)]
    assert doubtful(every, losses(4e-4, 5e-4), max_pairs=1) == [(SECOND, E4M3)]
    agreed = stacks((E4M3, BF16), (E4M3, E4M3))  # nothing hangs on the first site
    assert doubtful(agreed, losses(4e-4, 5e-4)) == [(SECOND, E4M3)]


def test_an_error_that_is_small_beside_the_stack_decides_nothing() -> None:
    every = stacks((E4M3, E4M3), (E4M3, BF16))
    uncertain = losses(1e-5, 3e-4)
    heavy = replace(uncertain[FIRST, E4M3], kl_nats=1.0)
    assert doubtful(every, uncertain) == [(SECOND, E4M3)]
    assert doubtful(every, {**uncertain, (FIRST, E4M3): heavy}) == []


def test_what_weighs_most_beside_its_stacks_comes_first() -> None:
    # Both errors are 4e-4: of 2.01e-3 nats where FIRST changes, of 1.01e-3 nats
    # where SECOND does.
    front = stacks((E4M3, E4M3), (BF16, E4M3), (BF16, BF16))
    assert doubtful(front, losses(4e-4, 4e-4)) == [(SECOND, E4M3), (FIRST, E4M3)]
    assert doubtful([], {}) == []


def test_a_measured_pair_replaces_its_estimate() -> None:
    found = settled(losses(4e-4, 4e-4), {(FIRST, E4M3): 2e-3})
    assert found[FIRST, E4M3] == Sensitivity(2e-3, 30.0, 0.0, 0.0, 0.0, exact=True)
    assert not found[SECOND, E4M3].exact


def test_a_job_measures_pairs_as_the_exact_sweep_does(spec: OptimizeSpec) -> None:
    work = Work(spec, Memory())
    pairs = [(FIRST, E4M3), (SECOND, BF16)]
    found = work.exact(pairs)
    wanted = {site: [choice] for site, choice in pairs}
    sequences = work.tokens.calibration.sequences
    want = exact(work.model, sequences, wanted, work.amaxes(), work.weights)
    for pair in pairs:
        assert found[pair] == pytest.approx(want[pair], rel=1e-12)
    assert work.exact([]) == {}
