from pathlib import Path

import pytest
import torch

from optimizer import local_run
from optimizer.local_prices import profile
from optimizer.local_run import (
    EMBEDDINGS,
    PROFILED,
    STEPS,
    Times,
    measure_stacks,
    opened,
    profiled,
    run,
    uniform,
)
from optimizer.native import Native
from optimizer.spec import OptimizeSpec, Workload
from optimizer.stack import Component, Site
from tests.optimizer import tiny

SHORT = Workload(batch_size=2, prompt_tokens=12, output_tokens=8)
MATRIX = Site(0, Component.FFN_IN)


@pytest.fixture(scope="module")
def model() -> Native:
    return Native(tiny.network())


def test_the_profiled_stacks_have_every_choice_of_the_rules_for_a_cpu(
    model: Native,
) -> None:
    stacks = profiled(model.shape)
    assert len(stacks) == len(PROFILED)
    assert {s.choices[MATRIX].name for s in stacks} == {
        "fp32",
        "bf16",
        "fp8_e4m3_weight_only",
    }
    assert {s.choices[EMBEDDINGS].name for s in stacks} == {"fp32", "bf16", "fp8_e4m3"}


def test_stacks_are_run_in_turn_and_say_on_what(spec: OptimizeSpec) -> None:
    folder = Path(spec.model_path)
    shape = opened(folder).shape
    asked = {"a": uniform(shape, ("bf16",)), "b": uniform(shape, ("fp32",))}
    found = measure_stacks(folder, asked, SHORT)
    assert found.keys() == {"a", "b"}
    for it in found.values():
        assert it.steps >= 2 * STEPS
        assert it.per_token_s > 0
        assert it.first_token_s is not None
        assert it.spread >= 0
        assert (it.engine, it.version) == ("torch", torch.__version__)


def test_a_stack_that_is_slow_is_run_twice_and_no_more(
    model: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_run, "LIMIT_S", 0.0)
    times = run(model, {"a": uniform(model.shape, ("bf16",))}, SHORT)
    assert times["a"].measured().steps == 2 * STEPS


def test_a_prompt_that_takes_too_long_is_left_out(
    model: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_run, "PREFILL_LIMIT_S", 0.0)
    found = profile(model, SHORT)
    assert found.prefill.sites == {}
    monkeypatch.undo()
    times = run(model, {"a": uniform(model.shape, ("bf16",))}, SHORT)
    times["a"].prefill.clear()
    assert times["a"].measured().first_token_s is None


def test_steps_of_more_than_one_run_are_taken_together() -> None:
    both = Times([1.0], [4.0], [{}], [{}])
    both.add(Times([3.0], [8.0], [{}], [{}]))
    assert both.measured().per_token_s == 2.0
    assert both.measured().first_token_s == 6.0
