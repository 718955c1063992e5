import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from optimizer import local_run
from optimizer.export_files import Outlet
from optimizer.local_prices import NOTE, profile
from optimizer.local_run import (
    EMBEDDINGS,
    PROFILED,
    STEPS,
    Measured,
    Times,
    end_to_end,
    measure_stacks,
    opened,
    profiled,
    run,
    silent,
    uniform,
)
from optimizer.native import Native
from optimizer.pieces import Memory
from optimizer.report import render_html
from optimizer.run import optimize
from optimizer.spec import LatencySla, OptimizeSpec, Workload
from optimizer.stack import Component, Site
from tests.optimizer import tiny
from tests.optimizer.conftest import Document, quiet
from tests.optimizer.example_document import example_document

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
        assert it.steps >= STEPS
        assert it.per_token_s > 0
        assert it.first_token_s is None or it.first_token_s > 0
        assert it.spread >= 0
        assert (it.engine, it.version) == ("torch", torch.__version__)


def test_a_job_for_this_processor_has_its_answer_and_uniform_stacks_run(
    spec: OptimizeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = opened(Path(spec.model_path)).shape
    bf16, narrow = uniform(shape, ("bf16",)), uniform(shape, PROFILED[-1])
    stacks = {"chosen": bf16, "all_bf16": bf16, "p3": narrow}
    here = replace(spec, hardware="local", workload=SHORT)
    calls: list[None] = []
    found = end_to_end(here, shape, stacks, lambda: calls.append(None))
    assert found.keys() == {"chosen", "all_bf16", "all_fp32"}
    assert found["chosen"] == found["all_bf16"]  # one stack, run once
    assert len(calls) >= 2 * 2  # two stacks, a turn and a prefill
    assert end_to_end(spec, shape, stacks, silent) == {}  # for an H100
    monkeypatch.setattr(local_run, "MEMORY_SHARE", 0.0)
    assert end_to_end(here, shape, stacks, silent) == {}


def test_when_time_is_up_every_stack_has_had_its_turn_and_no_prompt_is_run(
    model: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_run, "LIMIT_S", 0.0)
    times = run(model, {"a": uniform(model.shape, ("bf16",))}, SHORT)
    found = times["a"].measured()
    assert found.steps == STEPS
    assert found.first_token_s is None
    assert profile(model, SHORT).prefill.sites == {}


def test_steps_of_more_than_one_run_are_taken_together() -> None:
    both = Times([1.0], [4.0], [{}], [{}])
    both.add(Times([3.0], [8.0], [{}], [{}]))
    assert both.measured().per_token_s == 2.0
    assert both.measured().first_token_s == 6.0


def test_the_report_shows_what_was_run_end_to_end() -> None:
    measured = Measured(0.0123, None, 0.04, 16, "torch", "2.13.0", 2)
    document = example_document()
    assert "Run end to end" not in render_html(document)
    page = render_html(
        {**document, "runs": [{"label": "all_fp32", **asdict(measured)}]}
    )
    assert "Run end to end on this machine" in page
    for text in ("all fp32", "12.3", "torch 2.13.0", "2 threads, 16 steps"):
        assert text in page


@pytest.mark.slow
def test_a_job_for_this_processor_says_what_its_stacks_took(
    document_of: Callable[[str], Document],
) -> None:
    document = document_of("local")
    labels = {run["label"] for run in document["runs"]}
    assert labels == {"chosen", "all_fp32", "all_bf16", "all_e4m3_weight_only"}
    assert all(run["per_token_s"] > 0 for run in document["runs"])
    assert document["hardware"]["notes"] == [NOTE]
    assert document_of("h100")["runs"] == []


def test_what_an_engine_took_stands_beside_the_answer(
    spec: OptimizeSpec, tmp_path: Path
) -> None:
    taken = {"per_token_s": 11.0, "first_token_s": 12.0, "spread": 0.02, "steps": 9}
    taken |= {"engine": "vllm", "version": "0.32.0"}
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{json.dumps(taken)}'\n")
    python.chmod(0o755)
    asked = replace(
        spec,
        hardware="local",
        engine="vllm",
        exports=("compressed_tensors",),
        latency_sla=LatencySla(per_token_s=10.0),
    )
    kept = Memory()

    def served(out: str) -> Document:
        return optimize(asked, quiet, kept, outlet=Outlet(tmp_path / out, None, python))

    found = served("a")
    said = "takes 11.0\u00a0s per token under vllm 0.32.0 (measured; in torch "
    assert said in found["verdict"]["sentence"]
    assert found["verdict"]["outcome"] == "sla_not_met"
    assert any("vllm 0.32.0 served the exported" in limit for limit in found["limits"])
    assert not any("vllm" in w for w in found["warnings"])
    python.write_text("#!/bin/sh\necho 'ValueError: no kernel' >&2; exit 1\n")
    found = served("b")
    assert "vllm" not in found["verdict"]["sentence"]
    assert any("was not served here: vLLM does not" in w for w in found["warnings"])
