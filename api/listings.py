"""The endpoints of models and datasets."""

import os
import secrets
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Path as PathParameter, Request, Response
from starlette.concurrency import run_in_threadpool

from api import catalog, db, views
from api.access import DB, Caller
from api.errors import UnsupportedMediaType
from api.schemas import NAME_PATTERN, ModelRequest
from api.settings import settings
from api.strict import StrictRoute

JSONL = ("application/jsonl", "application/x-ndjson", "application/json-lines")

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["catalog"])


@router.get("/models")
def list_models(caller: Caller, session: DB) -> dict[str, Any]:
    """List the models that a request may name."""
    rows = catalog.models(session, caller.tenant_id)
    return views.whole_list([views.model(row) for row in rows])


@router.post("/models", status_code=201)
def create_model(
    body: ModelRequest, caller: Caller, response: Response
) -> dict[str, Any]:
    """Register a folder of weights under a name. 200 where the name was yours."""
    folder = catalog.allowed_folder(body.path, "/path")
    weights = catalog.weights_at(folder, "/path")
    with db.transaction() as session:
        row, created = catalog.register(session, caller.tenant_id, body.name, weights)
        view = views.model(row)
    response.status_code = 201 if created else 200
    return view


@router.get("/datasets")
def list_datasets(caller: Caller, session: DB) -> dict[str, Any]:
    """List the built-in data distributions and your own datasets."""
    built_in = [views.distribution(d) for d in catalog.DISTRIBUTIONS.values()]
    own = [views.dataset(d) for d in catalog.own_datasets(session, caller.tenant_id)]
    return views.whole_list(built_in + own)


@router.put(
    "/datasets/{name}",
    status_code=201,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {JSONL[0]: {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def put_dataset(
    name: Annotated[str, PathParameter(pattern=NAME_PATTERN)],
    caller: Caller,
    request: Request,
    response: Response,
) -> dict[str, Any]:
    """Upload JSON lines of `{"text"}` or `{"messages"}`. 200 where the name was yours."""
    catalog.require_free_name(name)
    _require_jsonl(request.headers.get("content-type", ""))
    upload = await _receive(request)
    try:
        row, created = await run_in_threadpool(
            catalog.store_dataset, caller.tenant_id, name, upload
        )
    finally:
        upload.unlink(missing_ok=True)
    response.status_code = 201 if created else 200
    return views.dataset(row)


def _require_jsonl(content_type: str) -> None:
    if content_type.partition(";")[0].strip().lower() not in JSONL:
        raise UnsupportedMediaType(f"send 'Content-Type: {JSONL[0]}'")


async def _receive(request: Request) -> Path:
    """Return a file with the body; `BodyLimit` counts its bytes."""
    folder = settings().data_dir / "datasets"
    folder.mkdir(parents=True, exist_ok=True)
    upload = folder / f".{secrets.token_hex(16)}.part"
    try:
        with upload.open("xb") as file:
            async for chunk in request.stream():
                file.write(chunk)
            file.flush()
            await run_in_threadpool(os.fsync, file.fileno())
    except BaseException:
        upload.unlink(missing_ok=True)
        raise
    return upload
