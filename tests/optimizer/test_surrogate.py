"""The corrected prediction: on losses whose law the test knows."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from optimizer.surrogate import IDENTITY, Kind, KlSums, Measured, Surrogate

KINDS: list[Kind] = [("ffn_in", "fp8_e4m3"), ("ffn_out", "fp8_e4m3"), ("norms", "bf16")]


def stacks(count: int, seed: int = 0) -> list[KlSums]:
    """Sums by kind over two decades."""
    rng = np.random.default_rng(seed)
    return [
        dict(zip(KINDS, (10 ** rng.uniform(-4, -2, 3)).tolist(), strict=True))
        for _ in range(count)
    ]


def measured(kl: float, width: float = 0.02) -> Measured:
    return Measured(kl, kl * (1 - width), kl * (1 + width))


def test_without_measurements_losses_add_up() -> None:
    sums = stacks(1)[0]
    for nothing in (IDENTITY, Surrogate.fit([], [])):
        assert nothing.predict(sums) == pytest.approx(sum(sums.values()))
        assert nothing.budget(0.25) == 0.25
        assert nothing.residual is None
    # A stack without loss teaches nothing either.
    lossless = Surrogate.fit([{}, sums], [measured(0.1), Measured(0.0, 0.0, 0.0)])
    assert lossless == IDENTITY


def test_a_power_law_is_found() -> None:
    # kl = 1.8 · sum^1.1, which is 1.8 · 0.01^0.1 = 1.14 times the sum at 0.01.
    seen = stacks(12)
    truth = [1.8 * sum(s.values()) ** 1.1 for s in seen]
    fitted = Surrogate.fit(seen, [measured(kl) for kl in truth])
    for sums in stacks(5, seed=1):
        want = 1.8 * sum(sums.values()) ** 1.1
        assert fitted.predict(sums) == pytest.approx(want, rel=0.03)
    assert fitted.residual is not None
    assert fitted.residual < 0.05


def test_kinds_that_weigh_more_together_are_told_apart() -> None:
    # ffn_out counts twice. Twenty stacks say so; one stack cannot.
    seen = stacks(20)
    heavy = [s[KINDS[0]] + 2 * s[KINDS[1]] + s[KINDS[2]] for s in seen]
    fitted = Surrogate.fit(seen, [measured(kl) for kl in heavy])
    ratio = fitted.weight(KINDS[1]) / fitted.weight(KINDS[0])
    assert ratio == pytest.approx(2.0, rel=0.1)
    one = Surrogate.fit(seen[:1], [measured(heavy[0])])
    assert one.weight(KINDS[1]) / one.weight(KINDS[0]) < 1.5
    assert one.predict(seen[0]) == pytest.approx(heavy[0], rel=0.05)
    assert one.residual is None
    assert one.weight(("router", "bf16")) == 1.0  # never seen


def test_one_wild_measurement_does_not_carry_the_fit_away() -> None:
    seen = stacks(12)
    truth = [sum(s.values()) for s in seen]
    truth[3] *= 30
    fitted = Surrogate.fit(seen, [measured(kl) for kl in truth])
    for sums in stacks(5, seed=1):
        assert fitted.predict(sums) == pytest.approx(sum(sums.values()), rel=0.15)


def test_wide_intervals_teach_less() -> None:
    seen = stacks(1)
    double = 2 * sum(seen[0].values())
    sharp, vague = (
        Surrogate.fit(seen, [measured(double, width)]) for width in (0.02, 3.0)
    )
    assert sharp.predict(seen[0]) > vague.predict(seen[0])


@given(seed=st.integers(0, 10**6), count=st.integers(1, 8))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_whatever_was_measured_more_loss_never_predicts_less(
    seed: int, count: int
) -> None:
    rng = np.random.default_rng(seed)
    noise = [measured(float(10 ** rng.uniform(-6, 1)), 0.5) for _ in range(count)]
    fitted = Surrogate.fit(stacks(count, seed), noise)
    assert fitted.predict({}) == 0.0
    low = stacks(1, seed + 1)[0]
    for kind in KINDS:
        high = {**low, kind: low[kind] * 1.5}
        assert 0.0 < fitted.predict(low) < fitted.predict(high) < math.inf
    whole = fitted.predict(low)
    added = sum(fitted.weight(k) * v for k, v in low.items())
    assert fitted.budget(whole) == pytest.approx(added)


def test_lists_of_different_length_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        Surrogate.fit(stacks(2), [measured(0.1)])


def test_an_interval_holds_what_is_within_it() -> None:
    one = Measured(1.0, 0.9, 1.2)
    assert [one.holds(x) for x in (0.89, 0.9, 1.2, 1.21)] == [False, True, True, False]
