"""From a task that trains, as a caller wrote it, to what a probe reads."""

import difflib
from dataclasses import replace
from typing import Any

from api.errors import Invalid
from api.schemas import OptimizeRequest, TaskRef
from optimizer.errors import SpecError
from optimizer.training.candidates import CANDIDATES
from optimizer.training.spec import OPTIMIZERS, TASKS, TASKS_OF, Planned, TrainingSpec

OF_SERVING = {  # what a training has not, and why
    "latency_sla": "a training has no latency target",
    "workload": "a training says its batch and its sequences in the task",
    "exports": "a training leaves configurations, whatever the engine",
    "engine": "a training is served by no engine",
    "max_memory_bytes": "a training is told what it takes of the device",
}

SCENARIOS = {"pretrain": "pretraining", "finetune": "finetuning", "lora": "lora"}
HELD = {"bf16": "mixed", "fp16": "mixed"}  # of an arithmetic, in the ledger of memory
LORA_RANK = TASKS_OF["lora"].lora_rank  # where an estimate names none


def trains(request: OptimizeRequest) -> bool:
    """Whether the task is one that is probed."""
    return request.task.type in TASKS


def training(request: OptimizeRequest) -> TrainingSpec | None:
    """Return how the task trains; None: it serves. Raises Invalid naming the field."""
    task = request.task
    given = [name for name in task.model_fields_set if name != "type"]
    if not trains(request):
        if given:
            raise Invalid(
                f"/task/{min(given)}",
                f"a task of type {task.type!r} trains nothing; "
                f"{', '.join(TASKS)} do, and have {min(given)}",
            )
        return None
    _refuse_serving(request)
    return of_task(task)


def _refuse_serving(request: OptimizeRequest) -> None:
    """Raise Invalid for a field that only a task of serving has."""
    for name, why in OF_SERVING.items():
        if name in request.model_fields_set and getattr(request, name) is not None:
            raise Invalid(f"/{name}", f"{why}: leave {name} out")
    for name in ("formats", "engine", "rounding"):
        if name in request.search.model_fields_set:
            raise Invalid(
                f"/search/{name}",
                "what a training may choose from is in task.candidates: "
                f"{', '.join(CANDIDATES)}",
            )
    data = request.data_distribution
    for name in ("calibration_tokens", "validation_tokens", "sequence_tokens"):
        if name in data.model_fields_set:
            raise Invalid(
                f"/data_distribution/{name}",
                "a training reads as much as its steps take: say task.steps, "
                "task.batch_size and task.sequence_tokens",
            )


def of_task(task: TaskRef) -> TrainingSpec:
    """Return how a task trains, what it does not say as is usual. Raises Invalid."""
    _require("optimizer", [task.optimizer] if task.optimizer else [], OPTIMIZERS)
    _require("candidates", task.candidates or [], tuple(CANDIDATES))
    given = task.model_dump(exclude={"type", "planned"}, exclude_unset=True)
    given = {k: v for k, v in given.items() if v is not None or k == "clip"}
    if task.candidates:
        given["candidates"] = tuple(dict.fromkeys(task.candidates))
    try:
        if task.planned is not None:
            given["planned"] = Planned(**task.planned.model_dump())
        return replace(TASKS_OF[task.type], **given)
    except SpecError as error:
        pointer = "/task/planned" if str(error).startswith("planned") else "/task"
        raise Invalid(pointer, str(error), error.code) from None


def estimated(request: OptimizeRequest) -> dict[str, Any]:
    """Return what a task says of the memory of its training; empty: it serves.

    A step's micro-batch is one device's. Raises Invalid naming the field.
    """
    how = training(request)
    if how is None:
        return {}
    arithmetic = how.planned.arithmetic if how.planned else "bf16"
    return {
        "scenario": SCENARIOS[request.task.type],
        "arithmetic": HELD.get(arithmetic, arithmetic),
        "optimizer": how.optimizer,
        "batch_size": how.batch_size,
        "sequence_tokens": how.sequence_tokens,
        "lora_rank": how.lora_rank if request.task.type == "lora" else None,
    }


def _require(field: str, names: list[str], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            meant = f"did you mean {' or '.join(close)}? " if close else ""
            raise Invalid(
                f"/task/{field}",
                f"no {name!r}; {meant}there are: {', '.join(known)}",
                f"unknown_{field}",
                list(known),
            )
