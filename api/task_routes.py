"""`GET /v1/tasks`: what a model may be for, and what a job then takes for granted."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict

from api.access import Caller
from api.strict import StrictRoute
from optimizer.spec import WORKLOADS

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["catalog"])


class WorkloadView(BaseModel):
    """How a model is served where the request does not say."""

    model_config = ConfigDict(from_attributes=True)

    batch_size: int
    prompt_tokens: int
    output_tokens: int
    tensor_parallel: int


class TaskView(BaseModel):
    """A task; its id is what `task` of a request names."""

    id: str
    object: Literal["task"] = "task"
    workload: WorkloadView


class TaskList(BaseModel):
    """All tasks, on one page."""

    object: Literal["list"] = "list"
    data: list[TaskView]
    has_more: bool = False
    next_cursor: None = None


@router.get("/tasks")
def list_tasks(caller: Caller) -> TaskList:
    """List the tasks, each with the workload that is usual for it."""
    found = [
        TaskView(id=name, workload=WorkloadView.model_validate(usual))
        for name, usual in WORKLOADS.items()
    ]
    return TaskList(data=found)
