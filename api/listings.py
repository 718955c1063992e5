"""The endpoints of models and datasets: what there is, one of them, a delete."""

import asyncio
import time
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Path as PathParameter, Query, Request, Response
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from api import (
    audit,
    catalog,
    catalog_views,
    datasets,
    db,
    expiry,
    inspection,
    storage_quota,
    upload_files,
    uploads,
)
from api.access import DB, Caller
from api.auth import Caller as Who
from api.catalog_shapes import (
    DatasetPage,
    DatasetView,
    ModelPage,
    SomeDataset,
    SomeModel,
    also,
)
from api.errors import NotFound, UnsupportedMediaType
from api.ids import NAME_PATTERN
from api.models import Upload, UploadState
from api.settings import settings
from api.strict import StrictRoute
from api.uploads import DATASETS, MODELS
from optimizer.datasets import DISTRIBUTIONS, Distribution

JSONL = ("application/jsonl", "application/x-ndjson", "application/json-lines")
POLL_S = 0.5

Json = dict[str, Any]
Limit = Annotated[int, Query(ge=1, le=100)]
After = Annotated[str | None, Query(max_length=200)]
Name = Annotated[
    str, PathParameter(pattern=NAME_PATTERN, description="The name it shall have.")
]
Wait = Annotated[
    int, Query(ge=0, le=60, description="Seconds to wait for the end of a check.")
]

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["catalog"])


# -- models --------------------------------------------------------------------


@router.get("/models", response_model=ModelPage)
def list_models(
    caller: Caller, session: DB, limit: Limit = 20, after: After = None
) -> Json:
    """List the models that a request may name, the newest first."""
    rows, cursor = catalog.page(session, caller.tenant_id, limit, after)
    return _page([catalog_views.model(row) for row in rows], cursor)


@router.get("/models/{model_id}", response_model=SomeModel)
async def get_model(model_id: str, caller: Caller, wait: Wait = 0) -> Json:
    """Show a model by id or name: its headers, its files. Or an upload of one."""
    return await _shown(caller, MODELS, model_id, wait)


@router.delete("/models/{model_id}", status_code=204)
def delete_model(model_id: str, caller: Caller) -> None:
    """Delete a model, its bytes too if it was uploaded. Or give up an upload."""
    with db.transaction() as session:
        row = catalog.find(session, caller.tenant_id, model_id)
        folder: Path | None
        if row is None:
            folder = _give_up(session, caller, MODELS, model_id)
        else:
            folder = catalog.delete(session, caller.tenant_id, row)
            uploads.forget(session, row.id)
            _note(session, caller, "model.deleted", row.id, row.name)
    expiry.remove(folder)


# -- datasets ------------------------------------------------------------------


@router.get("/datasets", response_model=DatasetPage)
def list_datasets(
    caller: Caller, session: DB, limit: Limit = 20, after: After = None
) -> Json:
    """List the built-in data distributions, then your own datasets, newest first."""
    rows, cursor = datasets.page(session, caller.tenant_id, limit, after)
    shown = [
        catalog_views.distribution(row)
        if isinstance(row, Distribution)
        else catalog_views.dataset(row)
        for row in rows
    ]
    return _page(shown, cursor)


@router.get("/datasets/{dataset_id}", response_model=SomeDataset)
async def get_dataset(dataset_id: str, caller: Caller, wait: Wait = 0) -> Json:
    """Show a dataset by id or name. Or an upload of one."""
    if dataset_id in DISTRIBUTIONS:
        return catalog_views.distribution(DISTRIBUTIONS[dataset_id])
    return await _shown(caller, DATASETS, dataset_id, wait)


@router.delete("/datasets/{dataset_id}", status_code=204)
def delete_dataset(dataset_id: str, caller: Caller) -> None:
    """Delete a dataset. Or give up an upload of one."""
    datasets.require_free_name(dataset_id)
    with db.transaction() as session:
        row = datasets.find(session, caller.tenant_id, dataset_id)
        path: Path | None
        if row is None:
            path = _give_up(session, caller, DATASETS, dataset_id)
        else:
            path = datasets.delete(session, row)
            uploads.forget(session, row.id)
            _note(session, caller, "dataset.deleted", row.id, row.name)
    expiry.remove(path)


@router.put(
    "/datasets/{dataset_id}",
    status_code=201,
    response_model=DatasetView,
    responses=also(200, DatasetView, "The name was yours; the old lines are gone"),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {JSONL[0]: {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def put_dataset(
    dataset_id: Name,
    caller: Caller,
    request: Request,
    response: Response,
    expires_in: Annotated[int | None, Query(ge=60, le=3650 * 86_400)] = None,
) -> Json:
    """Upload JSON lines of `{"text"}` or `{"messages"}`. 200 where the name was yours."""
    name = dataset_id
    datasets.require_free_name(name)
    _require_jsonl(request.headers.get("content-type", ""))
    target, limit = datasets.folder(caller.tenant_id), settings().max_dataset_bytes
    came = await upload_files.receive(request.stream(), target, limit)
    try:
        view, created = await run_in_threadpool(
            _keep, caller, name, came.path, expires_in
        )
    finally:
        came.path.unlink(missing_ok=True)
    response.status_code = 201 if created else 200
    return view


def _keep(caller: Who, name: str, came: Path, keep_s: int | None) -> tuple[Json, bool]:
    part = came.with_suffix(".kept")
    try:
        kept = inspection.dataset(came, part)
        with db.transaction() as session:
            storage_quota.require_room(session, caller.tenant_id, kept.bytes)
            tenant = caller.tenant_id
            row, created = datasets.keep(session, tenant, name, kept, keep_s)
            _note(session, caller, "dataset.created", row.id, name)
            return catalog_views.dataset(row), created
    finally:
        part.unlink(missing_ok=True)


def _require_jsonl(content_type: str) -> None:
    if content_type.partition(";")[0].strip().lower() not in JSONL:
        raise UnsupportedMediaType(f"send 'Content-Type: {JSONL[0]}'")


# -- both ----------------------------------------------------------------------


def finished(
    session: Session, tenant_id: str, kinds: Collection[str], upload: Upload
) -> Json | None:
    """Return what a complete upload has become. None: it was deleted since."""
    if kinds == DATASETS:
        found = datasets.find(session, tenant_id, upload.id)
        return catalog_views.dataset(found) if found else None
    model = catalog.find(session, tenant_id, upload.id)
    model = model or catalog.own(session, tenant_id, upload.name)  # a renewed folder
    return catalog_views.whole_model(model) if model else None


async def _shown(caller: Who, kinds: Collection[str], name: str, wait_s: int) -> Json:
    """Return the thing, or its upload; the latter at its end, if that comes soon."""
    until = time.monotonic() + wait_s
    while True:
        view = await run_in_threadpool(_look, caller.tenant_id, kinds, name)
        checking = view.get("state") == UploadState.CHECKING
        if not checking or time.monotonic() >= until:
            return view
        await asyncio.sleep(POLL_S)


def _look(tenant_id: str, kinds: Collection[str], name: str) -> Json:
    with db.reading() as session:
        if kinds == DATASETS:
            if found := datasets.find(session, tenant_id, name):
                return catalog_views.dataset(found)
        elif model := catalog.find(session, tenant_id, name):
            return catalog_views.whole_model(model)
        upload = uploads.find(session, tenant_id, kinds, name)
        if upload is None:
            noun = "dataset" if kinds == DATASETS else "model"
            raise NotFound(f"no {noun} {name[:64]!r}, and no upload of one")
        if upload.state is UploadState.COMPLETE:
            view = finished(session, tenant_id, kinds, upload)
            if view is not None:
                return view
        opened = upload.state is UploadState.OPEN
        missing = uploads.missing(session, upload) if opened else []
        return catalog_views.upload(upload, missing)


def _give_up(session: Session, caller: Who, kinds: Collection[str], name: str) -> Path:
    """Forget an upload, and return its folder. Raises NotFound."""
    upload = uploads.find(session, caller.tenant_id, kinds, name)
    if upload is None:
        noun = "dataset" if kinds == DATASETS else "model"
        raise NotFound(f"no {noun} {name[:64]!r}, and no upload of one")
    uploads.remove(session, upload)
    return upload_files.folder(upload.id)


def _note(session: Session, caller: Who, action: str, target: str, name: str) -> None:
    audit.record(session, caller.tenant_id, caller.actor, action, target, name=name)


def _page(rows: list[Json], cursor: str | None) -> Json:
    return {
        "object": "list",
        "data": rows,
        "has_more": cursor is not None,
        "next_cursor": cursor,
    }
