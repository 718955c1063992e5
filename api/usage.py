"""`GET /v1/usage`: what a tenant's jobs took, and what lies in the storage for it.

Jobs count in the period in which they ended, deleted ones too, for as long as their
rows are kept.
"""

from datetime import datetime, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel
from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from api import storage_quota
from api.access import DB, Caller
from api.errors import InvalidParameter
from api.filters import Moment
from api.models import FINAL, HELD, Job, KeptResult, Status
from api.strict import StrictRoute
from api.tallies import seconds
from api.transitions import now

DEFAULT = timedelta(days=30)

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["account"])


class DeviceUsage(BaseModel):
    """Jobs for one device that ended in the period, and how long workers held them.

    `running_seconds` is from the first worker to the end of each job, added up.
    """

    hardware: str
    jobs: int
    succeeded: int
    failed: int
    cancelled: int
    expired: int
    running_seconds: float


class JobsNow(BaseModel):
    """Jobs that have not ended."""

    queued: int
    running: int


class StorageUsage(BaseModel):
    """Bytes that are stored for the tenant.

    `uploads_bytes` are models and datasets, with those on their way in; `artifacts_bytes`
    what jobs left. Both count in the tenant's quota. Results are kept so that a second
    job on the same model is quick, and do not count.
    """

    uploads_bytes: int
    artifacts_bytes: int
    results_bytes: int


class Usage(BaseModel):
    """What jobs that ended from `since` on, and before `until`, took."""

    object: Literal["usage"] = "usage"
    since: datetime
    until: datetime
    created: int  # in the period, whether they ended or not
    devices: list[DeviceUsage]
    now: JobsNow
    storage: StorageUsage


@router.get("/usage")
def get_usage(
    caller: Caller,
    session: DB,
    since: Annotated[Moment | None, Query()] = None,
    until: Annotated[Moment | None, Query()] = None,
) -> Usage:
    """Sum up a period: the last 30 days, or from `since` up to `until`."""
    until = until or now(session)
    since = since or _before(until)
    if since >= until:
        raise InvalidParameter("since", "it must be before 'until'")
    tenant = caller.tenant_id
    return Usage(
        since=since,
        until=until,
        created=_created(session, tenant, since, until),
        devices=_devices(session, tenant, since, until),
        now=jobs_now(session, tenant),
        storage=_storage(session, tenant),
    )


def jobs_now(session: Session, tenant_id: str) -> JobsNow:
    """Count a tenant's jobs that have not ended."""
    queued = func.sum(case((Job.status == Status.QUEUED, 1), else_=0))
    running = func.sum(case((Job.status.in_(HELD), 1), else_=0))
    live = Job.status.in_((Status.QUEUED, *HELD))
    query = select(queued, running).where(Job.tenant_id == tenant_id, live)
    row = session.execute(query).one()
    return JobsNow(queued=row[0] or 0, running=row[1] or 0)


def _before(until: datetime) -> datetime:
    try:
        return until - DEFAULT
    except OverflowError:
        raise InvalidParameter("until", "there is no month before it") from None


def _created(session: Session, tenant_id: str, since: datetime, until: datetime) -> int:
    query = select(func.count()).where(
        Job.tenant_id == tenant_id, Job.created_at >= since, Job.created_at < until
    )
    return int(session.scalar(query) or 0)


def _devices(
    session: Session, tenant_id: str, since: datetime, until: datetime
) -> list[DeviceUsage]:
    took_s = func.sum(seconds(session, Job.started_at, Job.finished_at))
    ended = [func.sum(case((Job.status == each, 1), else_=0)) for each in FINAL]
    query = select(Job.hardware, func.count(), took_s, *ended).where(
        Job.tenant_id == tenant_id, Job.finished_at >= since, Job.finished_at < until
    )
    rows = session.execute(query.group_by(Job.hardware).order_by(Job.hardware))
    return [
        DeviceUsage(
            hardware=hardware,
            jobs=jobs,
            running_seconds=round(total_s or 0.0, 3),
            **{each.value: int(n) for each, n in zip(FINAL, counts, strict=True)},
        )
        for hardware, jobs, total_s, *counts in rows
    ]


def _storage(session: Session, tenant_id: str) -> StorageUsage:
    results = select(func.sum(KeptResult.bytes)).where(
        KeptResult.tenant_id == tenant_id
    )
    return StorageUsage(
        uploads_bytes=storage_quota.uploads_bytes(session, tenant_id),
        artifacts_bytes=storage_quota.artifacts_bytes(session, tenant_id),
        results_bytes=int(session.scalar(results) or 0),
    )
