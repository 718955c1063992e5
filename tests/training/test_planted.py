"""Seven runs that fail and are named by the doctor after it; five that do not."""

import math

import pytest

from optimizer.training.doctor import Diagnosis, diagnose
from optimizer.training.findings import Sure
from optimizer.training.health import Metric
from optimizer.training.logs import run_log
from tests.training.planted import BAD_STEP, HEALTHY, PLANTED, TOO_FAST, Run, trained

ALARMS = {
    "fp16_weights": Metric.UNCHANGED,
    "no_loss_scale": Metric.ZERO_RATE,
    "scale_too_high": Metric.BACKOFFS,
    "loud_activation": Metric.BACKOFFS,
    "bf16_weights": Metric.UNCHANGED,
    "fp8_outlier": Metric.FP8_FLUSHED,
    "nan_in_data": Metric.NONFINITE,
}
LAYERS = ("layers",)
PLAIN = ("layers", "skipped", "precision")  # what every logger has is left


def diagnosed(name: str, without: tuple[str, ...] = ()) -> Diagnosis:
    rows = [
        {k: v for k, v in record.items() if k not in without}
        for record in trained(name).log
    ]
    return diagnose(run_log(rows))


@pytest.mark.parametrize("run", PLANTED, ids=lambda run: run.name)
def test_each_planted_run_is_named_and_nothing_else(run: Run) -> None:
    found = diagnosed(run.name)
    assert [str(f.verdict) for f in found.findings] == [run.verdict]
    # NaN in the data is not to be seen in a log: what is seen is that nothing warned.
    certain = run.name != "nan_in_data"
    assert found.findings[0].sure is (Sure.CERTAIN if certain else Sure.LIKELY)


@pytest.mark.parametrize("run", PLANTED, ids=lambda run: run.name)
def test_each_planted_run_rings(run: Run) -> None:
    assert ALARMS[run.name] in {alarm.metric for alarm in trained(run.name).alarms}


@pytest.mark.parametrize("run", HEALTHY, ids=lambda run: run.name)
def test_a_healthy_run_rings_nothing_and_is_found_well(run: Run) -> None:
    assert trained(run.name).alarms == []
    for without in ((), LAYERS, PLAIN):
        assert diagnosed(run.name, without).well
    losses = trained(run.name).losses
    assert sum(losses[-10:]) / 10 < 0.6 * losses[0]


@pytest.mark.parametrize("run", HEALTHY[1:4], ids=lambda run: run.name)
def test_a_healthy_run_does_not_drift_from_fp32(run: Run) -> None:
    of_fp32 = sum(trained("fp32").losses[-10:])
    assert sum(trained(run.name).losses[-10:]) == pytest.approx(of_fp32, rel=0.01)


def test_what_overflows_is_named_as_the_layer_and_before_all_others() -> None:
    found = diagnosed("loud_activation").findings[0]
    assert found.layers == ("blocks.1.down",)
    assert "65504" in found.said


def test_the_bad_batch_is_named_by_its_step() -> None:
    found = diagnosed("nan_in_data").findings[0]
    assert found.steps[0] == BAD_STEP
    assert f"batch of step {BAD_STEP}" in found.first


def test_tensors_beside_an_outlier_are_named() -> None:
    found = diagnosed("fp8_outlier").findings[0]
    assert {name.rsplit(".", 2)[1] for name in found.layers} == {"qkv", "up"}


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("scale_too_high", "backoff_loop"),
        ("loud_activation", "layer_overflow"),
        ("bf16_weights", "frozen_weights"),
        ("nan_in_data", "bad_data"),
    ],
)
def test_four_of_them_show_without_layers_and_less_sure(
    name: str, verdict: str
) -> None:
    found = diagnosed(name, PLAIN)
    assert found.verdict == verdict
    assert found.findings[0].sure is not Sure.CERTAIN


def test_a_rate_that_is_too_high_is_named() -> None:
    found = diagnosed(TOO_FAST.name, PLAIN)
    assert [str(f.verdict) for f in found.findings] == [TOO_FAST.verdict]
    assert math.isnan(trained(TOO_FAST.name).losses[-1])
