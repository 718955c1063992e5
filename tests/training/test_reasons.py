"""Why a layer drifts: of planted runs each layer says what was planted, by hand the rest."""

from functools import cache

import pytest

from optimizer.training.candidates import CANDIDATES, Gemm
from optimizer.training.drift import drift
from optimizer.training.reasons import Reason, reasons
from optimizer.training.trainer import Figures
from optimizer.training.verdict import Tried, to_json
from tests.training import planted, setups

RUNS = {run.name: run for run in planted.PLANTED}
STEPS = 20


def figures(*norms: float, stopped: str | None = None) -> Figures:
    """A run of one layer, whose gradient has these norms."""
    losses = [1.0] * len(norms)
    held = {"a.0.w": list(norms)}
    return Figures(losses, norms=held, moved={"a.0.w": 1.0}, stopped=stopped)


def why(candidate: Figures) -> Reason:
    base = figures(*[1.0] * STEPS)
    drifts = drift(base, base, candidate)
    return reasons(CANDIDATES["bf16"], candidate, base, drifts)["a.0"]


def test_what_is_off_at_the_first_step_is_rounding() -> None:
    found = why(figures(*[1.03] * STEPS))
    assert found.code == "rounding"
    assert found.evidence["first_step"] == pytest.approx(0.03)
    assert "off by 3 % at the first step" in found.said


def test_what_leaves_later_is_explained_by_nothing_and_says_so() -> None:
    found = why(figures(1.002, 1.004, *[1.05] * (STEPS - 2)))
    assert found.code == "none_known"
    assert found.evidence == pytest.approx(
        {"first_step": 0.002, "last_step": 0.05, "step": 2}
    )
    assert "none of the known causes" in found.said
    assert "leaves 1 % at step 2" in found.said


def test_a_run_that_ends_says_where() -> None:
    found = why(figures(1.5, 1.5, stopped="the loss of step 2 is inf or NaN"))
    assert (found.code, found.evidence["step"]) == ("ended", 2)


def test_a_layer_that_follows_has_no_reason() -> None:
    base = figures(*[1.0] * STEPS)
    assert reasons(CANDIDATES["bf16"], base, base, drift(base, base, base)) == {}


@cache
def tried(name: str) -> Tried:
    _, planned = setups.probed(RUNS[name], steps=24)
    assert planned is not None
    return planned


def test_updates_lost_are_counted_by_layer() -> None:
    found = tried("bf16_weights").reasons
    assert {r.code for r in found.values()} == {"updates_lost"}
    assert found["blocks.0"].evidence["share"] > 0.9
    assert "of the updates of blocks.0 round away in bf16" in found["blocks.0"].said


def test_lost_gradients_name_the_product_and_who_gets_them_is_told_apart() -> None:
    found = tried("no_loss_scale").reasons
    assert found["blocks.1"].code == "gradients_lost"
    assert found["blocks.1"].matrix == "blocks.1.up"
    assert found["blocks.1"].gemms == (Gemm.WGRAD,)
    assert found["embed"].code == "handed_on"  # it is no matrix
    assert "elsewhere" in found["embed"].said


def test_an_outlier_is_named_where_other_layers_drift() -> None:
    found = tried("fp8_outlier").reasons
    assert {r.code for r in found.values()} == {"handed_on"}
    said = found["embed"]
    assert said.matrix in ("blocks.0.up", "blocks.1.up")
    assert said.gemms == (Gemm.FPROP, Gemm.DGRAD)  # those that read its weight
    assert said.evidence["share"] > 0.9


def test_the_report_has_a_reason_for_each_layer_that_drifts_and_for_no_other() -> None:
    found = tried("fp8_outlier")
    for row in to_json(found)["drift"]:
        assert (row["why"] is not None) == row["drifts"]
