"""Every planted run is predicted by a probe before it fails; a healthy one is let be.

The probe takes a third of a run's steps, and names what the doctor names after it.
"""

from dataclasses import replace

import pytest

from optimizer.training.candidates import Arithmetic
from optimizer.training.probe import Probed, probe_here
from optimizer.training.verdict import Outcome, Status
from tests.training import planted, setups

RUNS = {run.name: run for run in (*planted.PLANTED, *planted.HEALTHY)}
BAD_DATA = RUNS["nan_in_data"]
OTHERS = [run for run in planted.PLANTED if run is not BAD_DATA]


@pytest.mark.parametrize("run", OTHERS, ids=lambda run: run.name)
def test_what_will_fail_is_named_before(run: planted.Run) -> None:
    found, tried = setups.probed(run, steps=24)
    assert found.findings == []
    assert tried is not None
    assert not tried.follows
    assert tried.findings[0].code == run.verdict
    assert tried.findings[0].breaks
    assert tried.findings[0].first


def test_bad_data_is_no_precisions_fault() -> None:
    found, tried = setups.probed(BAD_DATA, steps=planted.BAD_STEP + 2)
    assert tried is None
    assert [f.code for f in found.findings] == ["bad_data"]
    assert found.findings[0].evidence["step"] == planted.BAD_STEP
    assert found.outcome is Outcome.UNSTABLE


def test_a_rate_that_is_too_high_is_no_precisions_fault() -> None:
    run = replace(planted.TOO_FAST, warmup_steps=0)  # a probe sees its full rate
    found, tried = setups.probed(run, steps=24)
    assert tried is None
    assert [f.code for f in found.findings] == ["learning_rate"]
    assert found.outcome is Outcome.UNSTABLE


@pytest.mark.parametrize("run", planted.HEALTHY, ids=lambda run: run.name)
def test_a_healthy_run_shows_no_drift(run: planted.Run) -> None:
    _, tried = setups.probed(run, steps=24)
    assert tried is not None
    assert [d.layer for d in tried.drifts if d.drifts] == []
    assert [f.code for f in tried.findings if f.breaks] == []
    assert tried.follows


# Promotions


def probe(name: str, *candidates: str) -> Probed:
    run, steps = RUNS[name], 16
    how = setups.with_candidates(run, *candidates, steps=steps)
    return probe_here(setups.problem(run, steps), how)


def test_an_outlier_is_cured_by_promoting_its_matrices_and_run_to_prove_it() -> None:
    result = probe("fp8_outlier", "fp8_current").results["fp8_current"]
    assert result.status is Status.CURED
    assert any(d.drifts for d in result.rounds[0].drifts)
    assert not any(d.drifts for d in result.last.drifts)
    promoted = {p.matrix for p in result.last.candidate.promotions}
    assert {"blocks.0.qkv", "blocks.0.up", "blocks.1.qkv", "blocks.1.up"} <= promoted
    assert "head" not in promoted


def test_what_overflows_fp16_trains_in_bf16() -> None:
    found = probe("loud_activation", "fp16", "bf16")
    assert found.chosen is not None
    assert found.chosen.candidate.name == "bf16"
    assert found.outcome is Outcome.RECOMMENDED
    fp16 = found.results["fp16"]
    assert fp16.status in (Status.CURED, Status.FAILS)
    first = fp16.rounds[1].candidate.promotions[0]
    assert (first.matrix, first.arithmetic) == ("blocks.1.down", Arithmetic.FP32)
