import math
from dataclasses import replace
from pathlib import Path

import pytest

from optimizer import kernels
from optimizer.choose import CostOf, modelled
from optimizer.cost import site_cost
from optimizer.fits import Kernel
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


def profile_of(
    model: ModelShape, tokens: tuple[int, ...], seconds: float = 1.0
) -> Tables:
    """Every matrix in bf16, at some numbers of tokens: one second each, to be seen."""
    rows = [
        {"fmt": "bf16", "m": m, "n": s.n, "k": s.k, "seconds": seconds, "spread": 0.03}
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


FIXED_S, FACTOR = 3e-6, 1.5


def fitted(kind: str = "gemm", fmt: str = "bf16", rows: int = 8) -> Tables:
    """A profile with a correction and no row that anything has the shape of."""
    fit = {"kind": kind, "fmt": fmt, "fixed_s": FIXED_S, "factor": FACTOR}
    said = {"schema": 1, "device": "h100", "engine": "torch", "engine_version": "2.13"}
    return kernels.from_profile(
        {
            **said,
            "measured_at": "now",
            "fits": [{**fit, "residual": 0.07, "rows": rows}],
        }
    )


def test_where_some_shapes_were_measured_the_model_is_corrected_by_them(
    model: ModelShape,
) -> None:
    big = replace(model.sites[1], n=4096, k=4096, weight_elements=4096 * 4096)
    assert big.site.component is Component.ATTN_QKV
    cost_of = preferring(fitted(), usual(model), model, H100, WORKLOAD)
    found = cost_of(big, bf16(Component.ATTN_QKV))
    moved = 2 * (4096 * 4096 + 2 * (4096 + 4096))  # two rows in a decode step
    sheet_s = moved / H100.bandwidth_bytes_s
    assert found.per_token_s == pytest.approx(FIXED_S + FACTOR * sheet_s)
    assert (found.basis, found.error) == ("roofline", 0.07)
    assert found.per_token_s != usual(model)(big, bf16(Component.ATTN_QKV)).per_token_s
    # A format that was not measured is priced as without the profile.
    e4m3 = choice_named(Component.ATTN_QKV, "fp8_e4m3")
    assert cost_of(big, e4m3) == usual(model)(big, e4m3)


def test_attention_is_corrected_phase_by_phase(model: ModelShape) -> None:
    scores = next(s for s in model.sites if s.site.component is Component.ATTN_SCORES)
    choice = bf16(Component.ATTN_SCORES)
    plain = usual(model)(scores, choice)
    only_steps = fitted("generation_attention")
    found = preferring(only_steps, usual(model), model, H100, WORKLOAD)(scores, choice)
    assert found.first_token_s == plain.first_token_s
    assert found.per_token_s != plain.per_token_s
    assert found.error == 0.07


def test_two_rows_correct_nothing(model: ModelShape) -> None:
    cost_of = preferring(fitted(rows=2), usual(model), model, H100, WORKLOAD)
    for shape in model.sites:
        choice = bf16(shape.site.component)
        assert cost_of(shape, choice) == usual(model)(shape, choice)


def test_a_kernel_that_takes_no_time_but_its_start_has_no_limits() -> None:
    fit = {"kind": "gemm", "fmt": "bf16", "fixed_s": FIXED_S, "factor": 0.0}
    said = {"schema": 1, "device": "h100", "engine": "torch", "engine_version": "2.13"}
    rows = [{**fit, "residual": 0.0, "rows": 3}]
    known = kernels.from_profile({**said, "measured_at": "now", "fits": rows})
    assert known.corrections["bf16"] == Kernel(FIXED_S, math.inf, math.inf, 0.0)


def test_a_job_on_a_profiled_device_says_that_it_was_measured(
    spec: OptimizeSpec,
) -> None:
    shape = outline(Path(spec.model_path)).shape
    profile = profile_of(shape, (4, 4 * 512))  # its workload: four sequences of 512
    document = optimize(spec, quiet, profile=profile)
    assert document["hardware"]["basis"] == "measured"
    assert document["hardware"]["profile"]["engine"] == "torch"
    assert document["hardware"]["profile"]["measured_at"] == "now"
    base = next(s for s in document["validation"]["stacks"] if s["id"] == "all_bf16")
    assert base["per_token_s"] > 4 * LAYERS + 1  # four matrices a layer, and the head


def test_each_part_says_whether_it_was_measured(spec: OptimizeSpec) -> None:
    shape = outline(Path(spec.model_path)).shape
    profile = profile_of(shape, (4, 4 * 512), seconds=2e-6)
    document = optimize(replace(spec, formats=("bf16",)), quiet, profile=profile)
    shares = document["hardware"]["basis_shares"]
    assert 0.05 < shares["measured"] < 1  # attention and norms are not in the profile
    said = document["hardware"]["method"]
    assert "kernels timed on the device itself (torch 2.13) (" in said
    basis = {
        (site["component"], choice["choice"]): choice["basis"]
        for site in document["sites"]
        for choice in site["alternatives"]
    }
    assert basis["ffn_in", "bf16"] == "measured"
    assert basis["ffn_in", "fp32"] == basis["norms", "bf16"] == "roofline"
