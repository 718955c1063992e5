"""`precision optimize --task finetune --lr 1e-5`: what is sent, and what is refused."""

import re
from typing import Any

import pytest
import typer

from api.training_options import NAMES, task, trains
from optimizer.training.spec import TrainingSpec


def options(**given: Any) -> dict[str, Any]:
    return {name: given.get(field) for name, field in NAMES.items()}


def test_every_option_is_a_field_of_a_training() -> None:
    assert set(NAMES.values()) <= set(TrainingSpec.__dataclass_fields__)


@pytest.mark.parametrize(
    ("said", "given", "sent"),
    [
        (None, {}, None),
        ("chat", {}, "chat"),
        ("chat", {"batch_size": 4}, "chat"),  # which is the workload's
        ("finetune", {}, "finetune"),
        (
            "finetune",
            {"learning_rate": 1e-5, "steps": 50, "batch_size": 4},
            {"type": "finetune", "learning_rate": 1e-5, "steps": 50, "batch_size": 4},
        ),
        (
            '{"type": "lora", "steps": 9, "clip": null}',
            {"steps": 50, "lora_rank": 4},
            {"type": "lora", "steps": 50, "clip": None, "lora_rank": 4},
        ),
    ],
)
def test_options_become_the_task(said: Any, given: Any, sent: Any) -> None:
    found = task(said, options(**given))
    assert found == sent
    assert trains(found) == (said not in (None, "chat"))


@pytest.mark.parametrize("said", [None, "chat"])
def test_an_option_of_a_training_wants_a_task_that_trains(said: str | None) -> None:
    wanted = re.escape("--lr is of a training: give --task pretrain, finetune, lora")
    with pytest.raises(typer.BadParameter, match=wanted):
        task(said, options(learning_rate=1e-5))


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="not JSON"):
        task('{"type": ', options())


@pytest.mark.parametrize("rate", [float("nan"), float("inf")])
def test_a_rate_that_json_has_not_is_refused(rate: float) -> None:
    with pytest.raises(typer.BadParameter, match="is no finite number"):
        task("finetune", options(learning_rate=rate))
    with pytest.raises(typer.BadParameter, match="NaN is no number"):
        task('{"type": "lora", "learning_rate": NaN}', options())
