"""`GET /v1/limits`: how much there may be of everything, for the caller's tenant."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from api import schemas, storage_quota, tenants, upload_bodies, usage
from api.access import DB, Caller
from api.models import Tenant
from api.settings import Settings, settings
from api.strict import MAX_DEPTH, StrictRoute
from optimizer import weights

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["account"])


class RequestLimits(BaseModel):
    """Per key, in a minute of the clock; null: as many as you like.

    `streams_per_key` are event streams that may be open at a time. `headers_bytes`
    are all headers of a request together.
    """

    requests_per_minute: int | None
    creates_per_minute: int | None
    streams_per_key: int
    body_bytes: int
    body_depth: int
    headers_bytes: int


class JobLimits(BaseModel):
    """Jobs of the tenant, and how many there are of them now."""

    max_queued: int
    queued: int
    max_running: int
    running: int
    max_attempts: int
    queued_seconds: float
    running_seconds: float
    metadata_pairs: int
    metadata_key_characters: int
    metadata_value_characters: int


class UploadLimits(BaseModel):
    """Models and datasets, and how much of the tenant's storage is used now: by them and
    by the files that jobs left.
    """

    model_bytes: int
    model_files: int
    safetensors_header_bytes: int
    tensors: int
    tensor_rank: int
    dataset_bytes: int  # in one request
    dataset_upload_bytes: int  # in parts
    part_bytes: int
    upload_seconds: float
    storage_bytes: int
    storage_used_bytes: int


class Kept(BaseModel):
    """How long things are kept: jobs' files and events after the end, the rest since
    it came.
    """

    artifacts_seconds: float
    events_seconds: float
    datasets_seconds: float
    idempotency_keys_seconds: float
    deleted_jobs_seconds: float


class Limits(BaseModel):
    """What holds for the caller's tenant. The operator may change it."""

    object: Literal["limits"] = "limits"
    requests: RequestLimits
    jobs: JobLimits
    uploads: UploadLimits
    webhook_endpoints: int
    kept: Kept


@router.get("/limits")
def get_limits(caller: Caller, session: DB) -> Limits:
    """Say how much there may be of everything, and how much of it is used."""
    say = settings()
    tenant = tenants.one(session, caller.tenant_id)
    used = storage_quota.used_bytes(session, caller.tenant_id)
    return Limits(
        requests=_requests(say),
        jobs=_jobs(say, tenant, usage.jobs_now(session, caller.tenant_id)),
        uploads=_uploads(say, used),
        webhook_endpoints=say.webhook_max_endpoints,
        kept=Kept(
            artifacts_seconds=say.artifacts_kept_s,
            events_seconds=say.events_kept_s,
            datasets_seconds=say.dataset_kept_s,
            idempotency_keys_seconds=say.idempotency_s,
            deleted_jobs_seconds=say.tombstones_kept_s,
        ),
    )


def _requests(say: Settings) -> RequestLimits:
    return RequestLimits(
        requests_per_minute=say.requests_per_minute or None,
        creates_per_minute=say.creates_per_minute or None,
        streams_per_key=say.streams_per_key,
        body_bytes=say.max_body_bytes,
        body_depth=MAX_DEPTH,
        headers_bytes=say.max_headers_bytes,
    )


def _jobs(say: Settings, tenant: Tenant, there: usage.JobsNow) -> JobLimits:
    queued, running = tenant.max_queued, tenant.max_running
    return JobLimits(
        max_queued=say.max_queued if queued is None else queued,
        queued=there.queued,
        max_running=say.max_running if running is None else running,
        running=there.running,
        max_attempts=say.max_attempts,
        queued_seconds=say.queue_limit_s,
        running_seconds=say.run_limit_s,
        metadata_pairs=schemas.MAX_PAIRS,
        metadata_key_characters=schemas.MAX_KEY,
        metadata_value_characters=schemas.MAX_VALUE,
    )


def _uploads(say: Settings, used: int) -> UploadLimits:
    return UploadLimits(
        model_bytes=say.max_model_bytes,
        model_files=upload_bodies.MAX_FILES,
        safetensors_header_bytes=weights.MAX_HEADER_BYTES,
        tensors=weights.MAX_TENSORS,
        tensor_rank=weights.MAX_RANK,
        dataset_bytes=say.max_dataset_bytes,
        dataset_upload_bytes=say.max_dataset_upload_bytes,
        part_bytes=say.part_bytes,
        upload_seconds=say.upload_limit_s,
        storage_bytes=say.tenant_storage_bytes,
        storage_used_bytes=used,
    )
