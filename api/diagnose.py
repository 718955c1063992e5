"""POST /v1/diagnose: a training run's log comes in, what it looks like goes out.

The body is the file as it is. Nothing of it is kept.
"""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool

from api.access import Caller
from api.errors import Invalid, UnsupportedMediaType
from api.strict import StrictRoute
from optimizer.training.doctor import diagnose as diagnosed
from optimizer.training.log_files import parse_log
from optimizer.training.logs import LogError

router = APIRouter(prefix="/v1", tags=["estimate"], route_class=StrictRoute)
MAX_LOG_BYTES = 16 << 20  # some 100,000 steps
KINDS = (
    "application/jsonl",
    "application/x-ndjson",
    "application/json",  # trainer_state.json
    "application/octet-stream",  # events of TensorBoard
)


@router.post(
    "/diagnose",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                kind: {"schema": {"type": "string", "format": "binary"}}
                for kind in KINDS
            },
        }
    },
)
async def diagnose(caller: Caller, request: Request) -> dict[str, Any]:
    """Say what a training run's log looks like, with evidence, and what to do first.

    JSON lines, Trainer's `trainer_state.json`, or an event file of TensorBoard.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in KINDS:
        raise UnsupportedMediaType(
            f"send the log as it is, with 'Content-Type: {KINDS[0]}', or one of: "
            + ", ".join(KINDS[1:])
        )
    return await run_in_threadpool(_answer, await request.body())


def _answer(content: bytes) -> dict[str, Any]:
    try:
        return diagnosed(parse_log(content)).to_json()
    except LogError as error:
        raise Invalid("", str(error), error.code) from None
