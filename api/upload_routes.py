"""The endpoints of uploads: a model or a dataset comes in parts, and is looked at."""

import asyncio
import base64
import re
from collections.abc import Collection
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path as PathParameter, Request, Response
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from api import (
    catalog,
    catalog_views,
    checks,
    datasets,
    db,
    idempotency,
    listings,
    part_plan,
    storage_quota,
    upload_files,
    uploads,
)
from api.access import Caller
from api.auth import Caller as Who
from api.catalog_shapes import (
    PartView,
    SomeDataset,
    SomeModel,
    UploadView,
    WholeModel,
    also,
)
from api.errors import (
    Invalid,
    InvalidParameter,
    InvalidState,
    NotFound,
    UnsupportedMediaType,
)
from api.idempotency import Answer, Idempotent, Once
from api.models import Upload, UploadState
from api.settings import settings
from api.strict import StrictRoute
from api.upload_bodies import CompleteBody, DatasetBody, ModelBody
from api.upload_errors import LengthMismatch, TooLarge
from api.upload_files import Came
from api.uploads import DATASETS, MODELS, Asked

DATA_FILE = "data.jsonl"
DIGEST = re.compile(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/]{43}=):\s*(?:,|$)")
BYTES_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/octet-stream": {
                "schema": {"type": "string", "format": "binary"}
            }
        },
    }
}
Json = dict[str, Any]
Number = Annotated[int, PathParameter(ge=1, le=10_000_000)]
ContentDigest = Annotated[
    str | None,
    Header(description="RFC 9530: `sha-256=:<base64>:` of the part's bytes. Required."),
]
LATER = "Looking at it takes longer: poll"

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["catalog"])


@router.post(
    "/models",
    status_code=201,
    response_model=SomeModel,
    responses={
        **also(200, WholeModel, "The name was yours; it is this folder now"),
        **also(202, UploadView, LATER),
    },
)
async def create_model(
    body: ModelBody, caller: Caller, once: Idempotent, response: Response
) -> Any:
    """Register a folder that the service sees, or open an upload of files.

    A folder is looked at: 201 with the model, 200 where the name was yours, or 202
    where that takes long; poll then.
    """
    if body.files is None:
        return await _register(body, caller, response)
    asked = Asked(
        "model", body.name, [file.model_dump() for file in body.files], body.expires_in
    )
    return await _open(asked, caller, once, body.model_dump(mode="json"))


@router.post("/datasets", status_code=201, response_model=UploadView)
async def create_dataset(body: DatasetBody, caller: Caller, once: Idempotent) -> Any:
    """Open an upload of JSON lines in parts; small ones may come in one PUT instead."""
    datasets.require_free_name(body.name)
    files = [{"path": DATA_FILE, "bytes": body.bytes}]
    asked = Asked("dataset", body.name, files, body.expires_in)
    return await _open(asked, caller, once, body.model_dump(mode="json"))


@router.put(
    "/models/{upload_id}/parts/{number}",
    openapi_extra=BYTES_BODY,
    response_model=PartView,
)
async def put_model_part(
    upload_id: str,
    number: Number,
    caller: Caller,
    request: Request,
    content_digest: ContentDigest = None,
) -> Json:
    """Send one part of a model. Sending it again is harmless."""
    return await _put(request, caller, MODELS, upload_id, number, content_digest)


@router.put(
    "/datasets/{upload_id}/parts/{number}",
    openapi_extra=BYTES_BODY,
    response_model=PartView,
)
async def put_dataset_part(
    upload_id: str,
    number: Number,
    caller: Caller,
    request: Request,
    content_digest: ContentDigest = None,
) -> Json:
    """Send one part of a dataset. Sending it again is harmless."""
    return await _put(request, caller, DATASETS, upload_id, number, content_digest)


@router.post(
    "/models/{upload_id}/complete",
    status_code=201,
    response_model=SomeModel,
    responses=also(202, UploadView, LATER),
)
async def complete_model(
    upload_id: str,
    caller: Caller,
    response: Response,
    body: CompleteBody | None = None,
) -> Json:
    """Make a model of the parts: 201, or 202 where looking at it takes long."""
    return await _complete(caller, MODELS, upload_id, body, response)


@router.post(
    "/datasets/{upload_id}/complete",
    status_code=201,
    response_model=SomeDataset,
    responses=also(202, UploadView, LATER),
)
async def complete_dataset(
    upload_id: str,
    caller: Caller,
    response: Response,
    body: CompleteBody | None = None,
) -> Json:
    """Make a dataset of the parts: 201, or 202 where looking at it takes long."""
    return await _complete(caller, DATASETS, upload_id, body, response)


# -- opening -------------------------------------------------------------------


async def _open(asked: Asked, caller: Who, once: Once, body: Json) -> Response:
    limit = (
        settings().max_model_bytes
        if asked.kind == "model"
        else settings().max_dataset_upload_bytes
    )
    if asked.bytes > limit:
        raise TooLarge(asked.kind, asked.bytes, limit)

    def act(session: Session) -> Answer:
        storage_quota.require_room(session, caller.tenant_id, asked.bytes)
        _require_new_name(session, caller.tenant_id, asked)
        upload = uploads.create(session, caller.tenant_id, caller.actor, asked)
        view = catalog_views.upload(upload, uploads.missing(session, upload))
        return idempotency.answer(201, view, {"Location": view["links"]["self"]})

    return (await run_in_threadpool(once.run, body, act)).response()


def _require_new_name(session: Session, tenant_id: str, asked: Asked) -> None:
    if asked.kind == "model":
        catalog.require_new_name(session, tenant_id, asked.name)
    else:
        datasets.require_new_name(session, tenant_id, asked.name)


async def _register(body: ModelBody, caller: Who, response: Response) -> Json:
    folder = await run_in_threadpool(catalog.allowed_folder, body.path or "", "/path")
    await run_in_threadpool(catalog.require_headers, folder, "/path")
    asked = Asked("folder", body.name, [{"path": str(folder), "bytes": 0}])

    def act() -> tuple[str, bool]:
        with db.transaction() as session:
            before = catalog.own(session, caller.tenant_id, body.name)
            upload = uploads.create(session, caller.tenant_id, caller.actor, asked)
            return upload.id, before is not None

    upload_id, known = await run_in_threadpool(act)
    view = await _checked(caller, MODELS, upload_id, response, "/path")
    if response.status_code == 201 and known:
        response.status_code = 200
    return view


# -- parts ---------------------------------------------------------------------


async def _put(
    request: Request,
    caller: Who,
    kinds: Collection[str],
    upload_id: str,
    number: int,
    digest: str | None,
) -> Json:
    part = await run_in_threadpool(_part, caller, kinds, upload_id, number)
    said = _digest(digest)
    _require_plain(request)
    target = upload_files.folder(upload_id) / "parts"
    came = await upload_files.receive(request.stream(), target, part.bytes)
    try:
        _require_whole(came, part, said)
        await run_in_threadpool(_keep, caller, kinds, upload_id, part, came)
    finally:
        came.path.unlink(missing_ok=True)
    return {
        "object": "part",
        "number": number,
        "bytes": came.bytes,
        "sha256": came.sha256,
    }


def _require_whole(came: Came, part: part_plan.Part, said: str) -> None:
    if came.bytes < part.bytes:
        raise LengthMismatch(f"{came.bytes} bytes came, the part has {part.bytes}")
    if came.sha256 != said:
        detail = f"the part's sha256 is {came.sha256}, Content-Digest says {said}"
        raise Invalid("", f"{detail}: send it again", "digest_mismatch")


def _digest(header: str | None) -> str:
    """Return the sha256 in a Content-Digest header, hex. Raises InvalidParameter."""
    match = DIGEST.search(header or "")
    if match is None:
        raise InvalidParameter(
            "Content-Digest", "send 'Content-Digest: sha-256=:<base64>:' of the part"
        )
    return base64.b64decode(match[1]).hex()


def _require_plain(request: Request) -> None:
    coding = request.headers.get("content-encoding", "identity")
    if coding.strip().lower() != "identity":
        raise UnsupportedMediaType("send the bytes as they are, without an encoding")


def _part(
    caller: Who, kinds: Collection[str], upload_id: str, number: int
) -> part_plan.Part:
    """Return what is to come. Raises NotFound and InvalidState before it comes."""
    with db.reading() as session:
        upload = uploads.get(session, caller.tenant_id, kinds, upload_id)
    uploads.require_open(upload)
    part = part_plan.part(upload.files, upload.part_bytes, number)
    if part is None:
        count = part_plan.count(upload.files, upload.part_bytes)
        raise NotFound(f"the upload has the parts 1 to {count}")
    return part


def _keep(
    caller: Who,
    kinds: Collection[str],
    upload_id: str,
    part: part_plan.Part,
    came: Came,
) -> None:
    """Give a file that is whole its place; its row says that it is there."""
    with db.transaction() as session:
        upload = uploads.get(session, caller.tenant_id, kinds, upload_id, lock=True)
        before = uploads.keep_part(session, upload, part, came.sha256)
        came.path.replace(upload_files.part_file(upload_id, part.number, came.sha256))
    if before is not None:
        old = upload_files.part_file(upload_id, part.number, before)
        old.unlink(missing_ok=True)


# -- the end -------------------------------------------------------------------


async def _complete(
    caller: Who,
    kinds: Collection[str],
    upload_id: str,
    body: CompleteBody | None,
    response: Response,
) -> Json:
    digests = {file.path: file.sha256 for file in body.files} if body else {}

    def act() -> None:
        with db.transaction() as session:
            upload = uploads.get(session, caller.tenant_id, kinds, upload_id, lock=True)
            if strange := digests.keys() - {file["path"] for file in upload.files}:
                raise Invalid("/files", f"the upload has no file {min(strange)[:80]!r}")
            uploads.begin_check(session, upload, digests)

    await run_in_threadpool(act)
    return await _checked(caller, kinds, upload_id, response)


async def _checked(
    caller: Who,
    kinds: Collection[str],
    upload_id: str,
    response: Response,
    pointer: str = "",
) -> Json:
    """Answer with what the upload has become; 202 where that takes long."""
    check = asyncio.wrap_future(checks.start(upload_id))
    _, slow = await asyncio.wait([check], timeout=settings().check_wait_s)
    if not slow:
        check.result()  # raises what went wrong on our side
    upload, view = await run_in_threadpool(_outcome, caller, kinds, upload_id)
    if upload.state is UploadState.FAILED and upload.error:
        error = upload.error
        raise Invalid(pointer, error["detail"], error["code"])
    response.status_code = 201 if upload.state is UploadState.COMPLETE else 202
    response.headers["Location"] = view.get("links", {}).get(
        "self", f"/v1/{'datasets' if kinds == DATASETS else 'models'}/{view['id']}"
    )
    if response.status_code == 202:
        response.headers["Retry-After"] = str(catalog_views.POLL_AFTER_S)
    return view


def _outcome(
    caller: Who, kinds: Collection[str], upload_id: str
) -> tuple[Upload, Json]:
    with db.reading() as session:
        upload = uploads.get(session, caller.tenant_id, kinds, upload_id)
        if upload.state is not UploadState.COMPLETE:
            return upload, catalog_views.upload(upload, [])
        found = listings.finished(session, caller.tenant_id, kinds, upload)
    if found is None:
        detail = "what the upload became has been deleted since"
        raise InvalidState(detail, current_status=upload.state)
    return upload, found
