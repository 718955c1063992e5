from dataclasses import replace
from pathlib import Path

import pytest

from optimizer import kernels
from optimizer.choose import CostOf, modelled
from optimizer.cost import site_cost
from optimizer.hardware import device
from optimizer.kernels import Tables
from optimizer.profiled import covers, preferring
from optimizer.run import optimize
from optimizer.spec import OptimizeSpec, Workload
from optimizer.stack import LINEAR, Choice, Component, ModelShape, choice_named
from optimizer.stream import outline
from tests.optimizer import tiny
from tests.optimizer.conftest import quiet
from tests.service import LAYERS

H100 = device("h100")
WORKLOAD = Workload(batch_size=2, prompt_tokens=64, output_tokens=8)


@pytest.fixture(scope="module")
def model() -> ModelShape:
    return tiny.loaded().shape


def profile_of(model: ModelShape, tokens: tuple[int, ...]) -> Tables:
    """Every matrix in bf16, at some numbers of tokens: one second each, to be seen."""
    rows = [
        {"fmt": "bf16", "m": m, "n": s.n, "k": s.k, "seconds": 1.0, "spread": 0.03}
        for s in model.sites
        if s.site.component in LINEAR
        for m in tokens
    ]
    said = {"schema": 1, "device": "h100", "engine": "torch", "engine_version": "2.13"}
    return kernels.from_profile({**said, "measured_at": "now", "gemm": rows})


def usual(model: ModelShape) -> CostOf:
    return modelled(model, H100, WORKLOAD)


def bf16(component: Component) -> Choice:
    return choice_named(component, "bf16")


def test_what_was_measured_comes_before_the_model(model: ModelShape) -> None:
    cost_of = preferring(
        profile_of(model, (2, 128)), usual(model), model, H100, WORKLOAD
    )
    matrix = next(s for s in model.sites if s.site.component is Component.FFN_IN)
    found = cost_of(matrix, bf16(Component.FFN_IN))
    assert (found.per_token_s, found.first_token_s) == (1.0, 1.0)
    assert (found.basis, found.error) == ("measured", 0.03)
    assert (found.first_basis, found.first_error) == ("measured", 0.03)
    assert covers(cost_of, model)


def test_a_phase_that_was_not_measured_is_what_it_was(model: ModelShape) -> None:
    cost_of = preferring(profile_of(model, (2,)), usual(model), model, H100, WORKLOAD)
    matrix = next(s for s in model.sites if s.site.component is Component.FFN_IN)
    choice = bf16(Component.FFN_IN)
    plain = site_cost(matrix, choice, H100, WORKLOAD, model)
    found = cost_of(matrix, choice)
    assert found == replace(plain, per_token_s=1.0, basis=found.basis, error=0.03)
    assert found.basis == "measured"


def test_a_choice_that_was_not_measured_is_what_it_was(model: ModelShape) -> None:
    cost_of = preferring(profile_of(model, (128,)), usual(model), model, H100, WORKLOAD)
    matrix = next(s for s in model.sites if s.site.component is Component.FFN_IN)
    choice = choice_named(Component.FFN_IN, "fp8_e4m3")
    assert cost_of(matrix, choice) == site_cost(matrix, choice, H100, WORKLOAD, model)
    assert not covers(cost_of, model)  # a decode step has 2 tokens, not 128


def test_a_job_on_a_profiled_device_says_that_it_was_measured(
    spec: OptimizeSpec,
) -> None:
    shape = outline(Path(spec.model_path)).shape
    profile = profile_of(shape, (4, 4 * 512))  # its workload: four sequences of 512
    document = optimize(spec, quiet, profile=profile)
    assert document["hardware"]["basis"] == "measured"
    base = next(s for s in document["validation"]["stacks"] if s["id"] == "all_bf16")
    assert base["per_token_s"] > 4 * LAYERS + 1  # four matrices a layer, and the head
