"""How a probed training is said on the command line: `--task finetune --lr 1e-5`."""

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, NoReturn

import typer

from optimizer.training.spec import TASKS

PANEL = "Training (--task pretrain, finetune, lora)"
NAMES = {  # option -> field of the task
    "--lr": "learning_rate",
    "--optimizer": "optimizer",
    "--steps": "steps",
    "--warmup": "warmup_steps",
    "--accumulation": "accumulation",
    "--sequence-tokens": "sequence_tokens",
    "--lora-rank": "lora_rank",
    "--batch-size": "batch_size",
}


def _whole(name: str, said: str, least: int = 1) -> Any:
    return typer.Option(name, min=least, help=said, rich_help_panel=PANEL)


Task = Annotated[
    str | None,
    typer.Option(
        help="chat, completion, …, or pretrain, finetune, lora; or as JSON: "
        '{"type": "lora", "steps": 50}.'
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        "--lr", help="Learning rate after the warm-up.", rich_help_panel=PANEL
    ),
]
Rule = Annotated[
    str | None,
    typer.Option(
        "--optimizer", help="adam, sgd or sgd_momentum.", rich_help_panel=PANEL
    ),
]
Steps = Annotated[int | None, _whole("--steps", "Of the probe, 4 to 5000.")]
Warmup = Annotated[int | None, _whole("--warmup", "Steps of the warm-up.", 0)]
Accumulation = Annotated[int | None, _whole("--accumulation", "Batches of a step.")]
Sequence = Annotated[int | None, _whole("--sequence-tokens", "Of a training sample.")]
Rank = Annotated[int | None, _whole("--lora-rank", "Of the adapters.")]


def task(said: str | None, options: Mapping[str, Any]) -> str | dict[str, Any] | None:
    """Return the task to send: a name, or an object with what the options say.

    Raises BadParameter for JSON that is none, and for options of a training that the
    task has not: `--batch-size` alone belongs to serving as well.
    """
    rate = options.get("--lr")
    if rate is not None and not math.isfinite(rate):
        raise typer.BadParameter(f"{rate} is no finite number", param_hint="--lr")
    given = {NAMES[name]: v for name, v in options.items() if v is not None}
    if said is not None and said.startswith("{"):
        return {**_object(said), **given}
    if said in TASKS:
        return {"type": said, **given} if given else said
    alone = [n for n, v in options.items() if v is not None and n != "--batch-size"]
    if alone:
        raise typer.BadParameter(
            f"{alone[0]} is of a training: give --task {', '.join(TASKS)}",
            param_hint=alone[0],
        )
    return said


def _object(said: str) -> dict[str, Any]:
    try:
        return dict(json.loads(said, parse_constant=_no_number))
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint="--task") from None


def _no_number(said: str) -> NoReturn:
    """Refuse what Python reads as a number and JSON has not: NaN, Infinity."""
    raise ValueError(f"{said} is no number")


def trains(task: str | dict[str, Any] | None) -> bool:
    """Whether a task that is sent is one that is probed."""
    return (task.get("type") if isinstance(task, dict) else task) in TASKS
