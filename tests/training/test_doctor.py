"""Signs on logs made by hand."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from optimizer.training.doctor import diagnose
from optimizer.training.doctor_facts import losses, scale
from optimizer.training.findings import Sure, Verdict
from optimizer.training.logs import run_log

NAN = math.nan


def falling(steps: int = 60) -> list[dict[str, Any]]:
    """A run that learns: 5 to 2, with a wave of ±0.02 as noise."""
    return [
        {
            "step": n,
            "loss": 2 + 3 * math.exp(-n / 12) + 0.02 * math.cos(2.1 * n),
            "grad_norm": 1 + 0.1 * math.cos(1.3 * n),
            "learning_rate": 1e-3,
        }
        for n in range(steps)
    ]


def verdicts(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(str(f.verdict), str(f.sure)) for f in diagnose(run_log(rows)).findings]


def test_a_run_that_learns_is_well() -> None:
    assert verdicts(falling()) == [("nothing_wrong", "likely")]


def test_without_a_norm_being_well_is_less_sure() -> None:
    rows = [{k: v for k, v in r.items() if k != "grad_norm"} for r in falling()]
    assert verdicts(rows) == [("nothing_wrong", "possible")]


def test_what_a_log_lacks_is_told_and_what_to_log() -> None:
    rows = [{"step": r["step"], "lr": 1e-3} for r in falling()]
    (found,) = diagnose(run_log(rows)).findings
    assert found.evidence[0].startswith("the log has no loss and no gradient norm")
    assert found.first.startswith("Log loss and gradient norm")


def test_a_learning_rate_of_zero_is_the_cause() -> None:
    rows = [{**r, "loss": 5.0, "learning_rate": 0.0} for r in falling()]
    (found,) = diagnose(run_log(rows)).findings
    assert (found.verdict, found.sure) == (Verdict.LEARNING_RATE, Sure.CERTAIN)
    assert "is 0 in all 60 records" in found.evidence[0]


def test_ten_records_are_the_least_to_judge_by() -> None:
    found = diagnose(run_log(falling(9))).findings[0]
    assert found.sure is Sure.POSSIBLE
    assert found.evidence[0] == "9 records are too few to judge a run by"


def test_the_first_and_the_last_tenth_are_medians() -> None:
    rows = [
        {"step": n, "loss": v} for n, v in enumerate([5, 4, 3, 2, 2, 2, 2, 9, 2, 2])
    ]
    seen = losses(run_log(rows))
    assert seen is not None
    assert (seen.first, seen.last, seen.best) == (4, 2, 2)
    assert seen.fell == 0.5


def test_a_single_bad_batch_is_seen_and_named() -> None:
    rows = falling()
    rows[40]["loss"] = 7.0
    found = diagnose(run_log(rows)).findings[0]
    assert (found.verdict, found.sure) == (Verdict.BAD_DATA, Sure.POSSIBLE)
    assert found.steps == (40,)


def test_a_step_that_a_scaler_left_out_for_its_data_is_bad_data() -> None:
    rows = falling()
    for n, row in enumerate(rows):
        row["loss_scale"] = 65536 if n < 40 else 32768
    rows[40] |= {"loss": NAN, "grad_norm": NAN}
    assert verdicts(rows) == [("bad_data", "likely")]


def test_losses_that_no_scale_makes_finite_are_no_bad_data() -> None:
    """Good steps lie between, and each of the others halves the scale."""
    rows, scale = falling(), 65536.0
    for n, row in enumerate(rows):
        if n >= 30 and n % 3 == 0:
            row |= {"loss": NAN, "grad_norm": NAN}
            scale /= 2
        row["loss_scale"] = scale
    found = diagnose(run_log(rows)).findings[0]
    assert (found.verdict, found.sure) == (Verdict.LAYER_OVERFLOW, Sure.LIKELY)


def test_a_scale_that_is_found_by_a_few_back_offs_is_well() -> None:
    rows = falling()
    for n, row in enumerate(rows):
        row["loss_scale"] = 2.0 ** max(16 - n, 10)
    assert verdicts(rows) == [("nothing_wrong", "likely")]


def test_a_scale_that_keeps_falling_is_a_loop() -> None:
    rows = falling()
    for n, row in enumerate(rows):
        row["loss_scale"] = 2.0 ** (60 - n)
    assert verdicts(rows) == [("backoff_loop", "likely")]
    seen = scale(run_log(rows))
    assert seen is not None
    assert (len(seen.skipped), seen.lowest) == (59, 2.0)


def test_halvings_between_two_records_are_counted_each() -> None:
    rows = [{"step": 100 * n, "loss_scale": 2.0 ** (16 - 3 * n)} for n in range(4)]
    seen = scale(run_log(rows))
    assert seen is not None
    assert len(seen.skipped) == 9


def test_losses_that_no_scale_makes_finite_are_an_overflow() -> None:
    rows = falling()
    for n, row in enumerate(rows):
        row["loss_scale"] = 65536.0 if n < 30 else 65536.0 / 2 ** (n - 29)
        if n >= 30:
            row |= {"loss": NAN, "grad_norm": NAN}
    assert verdicts(rows) == [("layer_overflow", "likely")]


def test_a_loss_that_rises_before_it_is_nan_is_the_rate_and_not_the_data() -> None:
    rows = falling()
    for n in range(40, 60):
        rows[n] |= {"loss": 2 + (n - 40) * 0.5, "grad_norm": 1.5 ** (n - 40)}
    for n in range(56, 60):
        rows[n] |= {"loss": NAN, "grad_norm": NAN}
    assert verdicts(rows)[0] == ("learning_rate", "likely")


def test_a_norm_of_nothing_is_underflow() -> None:
    rows = [r | {"grad_norm": 1e-9, "loss": 5.0 + 1e-4 * r["step"]} for r in falling()]
    assert verdicts(rows)[0] == ("gradient_underflow", "likely")


def test_a_loss_that_stands_from_the_start_is_frozen_weights() -> None:
    rows = [r | {"loss": 5.0 - 1e-4 * r["step"]} for r in falling()]
    assert verdicts(rows) == [("frozen_weights", "likely")]


def test_a_loss_that_stands_late_in_a_run_is_well() -> None:
    rows = [r | {"loss": 2.0, "step": 90_000 + r["step"]} for r in falling()]
    assert verdicts(rows) == [("nothing_wrong", "likely")]


def any_values() -> Iterator[Any]:
    yield from (0, -1, 1e308, -1e308, NAN, math.inf, None, "x", [], {}, True, 10**400)


@pytest.mark.parametrize("value", list(any_values()), ids=repr)
@pytest.mark.parametrize("name", ["step", "loss", "grad_norm", "loss_scale", "layers"])
def test_no_value_makes_the_doctor_fail(name: str, value: Any) -> None:
    rows = falling(30)
    for row in rows[::2]:
        row |= {"loss_scale": 65536.0, name: value}
    found = diagnose(run_log(rows))
    json.dumps(found.to_json())
    for row in rows:
        row["layers"] = {"h.0": value, "h.1": {"flushed": value, "unchanged": value}}
    diagnose(run_log(rows))
