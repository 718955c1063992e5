from pathlib import Path

import pytest

from optimizer import local, local_run
from optimizer.errors import HardwareError
from optimizer.local_prices import (
    LAST_NORM,
    NOTE,
    Profile,
    costs,
    priced,
    prices,
    target,
)
from optimizer.local_run import opened, profiled, run, uniform
from optimizer.native import Native
from optimizer.spec import OptimizeSpec, Workload
from optimizer.stack import (
    Component,
    ModelShape,
    Site,
    SiteShape,
    Stack,
    choice_named,
)
from tests.optimizer import tiny

SHORT = Workload(batch_size=2, prompt_tokens=12, output_tokens=8)
MATRIX = Site(0, Component.FFN_IN)


@pytest.fixture(scope="module")
def model() -> Native:
    return Native(tiny.network())


def two_sites() -> ModelShape:
    """A matrix and the last norm, whose figures can be added up by hand."""
    sites = (SiteShape(MATRIX, n=8, k=4), SiteShape(LAST_NORM, elements=4))
    return ModelShape("", 1, 4, 8, 0, 0, 0, False, sites)


def stack(matrix: str, norm: str) -> Stack:
    return Stack(
        {
            MATRIX: choice_named(MATRIX.component, matrix),
            LAST_NORM: choice_named(LAST_NORM.component, norm),
        }
    )


def test_what_sites_do_not_explain_goes_with_the_last_norm() -> None:
    parts = [{MATRIX: 3.0, LAST_NORM: 1.0}, {MATRIX: 5.0, LAST_NORM: 1.0}]
    found = prices(two_sites(), [(stack("bf16", "bf16"), [10.0, 12.0], parts)])
    matrix, norm = two_sites().sites
    # Medians: 11 in all, 4 in the matrix, 1 in the norm; 6 are left.
    assert found.of(matrix, choice_named(MATRIX.component, "bf16")) == 4.0
    assert found.of(norm, choice_named(LAST_NORM.component, "bf16")) == 1.0 + 6.0
    assert found.of(matrix, choice_named(MATRIX.component, "fp32")) is None
    assert found.error == pytest.approx(1 / 11)  # quartiles at 10.5 and 11.5


def test_a_later_run_prices_what_is_new_so_that_the_sum_is_what_it_took() -> None:
    first = (stack("bf16", "bf16"), [11.0], [{MATRIX: 4.0, LAST_NORM: 1.0}])
    narrow = stack("fp8_e4m3_weight_only", "bf16")
    # The norm took longer than before, too: 22 - 1 - 6 is the matrix's, not 10.
    later = (narrow, [22.0], [{MATRIX: 10.0, LAST_NORM: 2.0}])
    found = prices(two_sites(), [first, later])
    matrix, norm = two_sites().sites
    assert found.of(matrix, narrow.choices[MATRIX]) == pytest.approx(15.0)
    assert found.of(norm, narrow.choices[LAST_NORM]) == 7.0


def test_noise_makes_no_price_negative() -> None:
    # Parts that add up to more than the whole leave 0, and a later run that was
    # faster than what it shares with the first says nothing of what is new in it.
    first = (stack("bf16", "bf16"), [4.0], [{MATRIX: 4.0, LAST_NORM: 1.0}])
    narrow = stack("fp8_e4m3_weight_only", "bf16")
    found = prices(two_sites(), [first, (narrow, [0.5], [{MATRIX: 2.0}])])
    matrix, norm = two_sites().sites
    assert found.of(norm, choice_named(LAST_NORM.component, "bf16")) == 1.0
    assert found.of(matrix, narrow.choices[MATRIX]) == 2.0


def test_a_run_without_steps_prices_nothing() -> None:
    found = prices(two_sites(), [(stack("bf16", "bf16"), [], [])])
    assert found.sites == {}


def test_the_profile_of_uniform_runs_adds_up_to_them(model: Native) -> None:
    stacks = dict(enumerate(profiled(model.shape)))
    times = run(model, stacks, SHORT)
    found = priced(model, stacks, times)
    for number, each in stacks.items():
        total = sum(
            found.decode.of(s, each.choices[s.site]) or 0.0 for s in model.shape.sites
        )
        assert total == pytest.approx(times[number].measured().per_token_s)


def test_what_a_profile_lacks_is_run_alone(model: Native) -> None:
    device = local.device()
    shape = next(s for s in model.shape.sites if s.site == MATRIX)
    bf16 = choice_named(MATRIX.component, "bf16")
    empty = prices(model.shape, [])
    cost = costs(model.shape, device, SHORT, Profile(empty, empty))(shape, bf16)
    assert cost.per_token_s > 0
    assert cost.first_token_s > 0
    layers = {Site(i, Component.FFN_IN): 0.25 for i in range(tiny.LAYERS)}
    known = prices(model.shape, [(uniform(model.shape, ("bf16",)), [1.0], [layers])])
    cost = costs(model.shape, device, SHORT, Profile(known, empty))(shape, bf16)
    assert cost.per_token_s == 0.25
    assert cost.first_token_s not in (0.0, 0.25)
    cost = costs(model.shape, device, SHORT, Profile(known, known))(shape, bf16)
    assert cost.first_token_s == 0.25
    assert cost.basis == cost.first_basis == "measured"


def test_a_model_that_memory_holds_in_one_precision_only_is_summed_and_says_so(
    spec: OptimizeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(spec.model_path)
    shape = opened(folder).shape
    device, cost_of, casts = target(folder, shape, SHORT)
    assert casts.pairs
    assert device.notes == (NOTE,)
    bf16 = choice_named(MATRIX.component, "bf16")
    matrix = next(s for s in shape.sites if s.site == MATRIX)
    assert cost_of(matrix, bf16).per_token_s > 0
    monkeypatch.setattr(local_run, "MEMORY_SHARE", 0.0)
    with pytest.raises(HardwareError, match="GB are free for them"):
        opened(folder)
    device, cost_of, _ = target(folder, shape, SHORT)
    assert "not run end to end here" in device.notes[-1]
    assert cost_of(matrix, bf16).per_token_s > 0
