"""What owners do with jobs beside running them: find them, watch them, delete them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import ColumnElement, func, select, update
from sqlalchemy.orm import Session

from api import cursors, jobs
from api.errors import InvalidState
from api.models import FINAL, Artifact, Job, Status
from api.transitions import now

WATCHED_AT_ONCE = 500  # ids in one query


@dataclass(frozen=True, slots=True)
class Filter:
    """Which jobs a list has. What is not said does not matter."""

    statuses: Sequence[Status] = ()
    hardware: str | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    ascending: bool = False


class Mark(NamedTuple):
    """What changes when a job does; queries of many jobs at once stay small."""

    last_seq: int
    status: Status
    percent: float
    deleted: bool


def page(
    session: Session,
    tenant_id: str,
    limit: int,
    after: str | None = None,
    wanted: Filter | None = None,
) -> tuple[list[Job], str | None]:
    """Return jobs, the newest first, and the cursor of the next page if there is one."""
    wanted = wanted or Filter()
    query = select(Job).where(Job.tenant_id == tenant_id, Job.deleted_at.is_(None))
    query = query.where(*_conditions(session, wanted))
    order = "asc" if wanted.ascending else "desc"
    kind = f"jobs:{tenant_id}:{order}"
    return cursors.page(
        session, query, Job.id, kind, limit, after, ascending=wanted.ascending
    )


def marks(session: Session, ids: Collection[str]) -> dict[str, Mark]:
    """Return the marks of jobs, whoever owns them: the caller knows that already."""
    found: dict[str, Mark] = {}
    wanted = sorted(ids)
    for start in range(0, len(wanted), WATCHED_AT_ONCE):
        some = wanted[start : start + WATCHED_AT_ONCE]
        rows = session.execute(
            select(Job.id, Job.last_seq, Job.status, Job.percent, Job.deleted_at)
            .where(Job.id.in_(some))
            .order_by(Job.id)
        )
        for job_id, last_seq, status, percent, deleted_at in rows:
            found[job_id] = Mark(last_seq, status, percent, deleted_at is not None)
    return found


def mark(row: Job) -> Mark:
    """Return the mark of a row at hand."""
    return Mark(row.last_seq, row.status, row.percent, row.deleted_at is not None)


def delete(session: Session, tenant_id: str, job_id: str) -> bool:
    """Leave a tombstone of a job; its files' bytes are the caller's to remove.

    False: it was one already. Raises NotFound, or InvalidState before the end.
    """
    job = jobs.get(session, tenant_id, job_id)
    if job.status not in FINAL:
        detail = f"the job is {job.status}: cancel it first, and wait for its end"
        raise InvalidState(detail, current_status=job.status)
    if job.deleted_at is not None:
        return False
    at = now(session)
    job.deleted_at = at
    session.execute(
        update(Artifact)
        .where(Artifact.job_id == job.id, Artifact.purged_at.is_(None))
        .values(purged_at=at)
    )
    session.flush()
    return True


def _conditions(session: Session, wanted: Filter) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    if wanted.statuses:
        found.append(Job.status.in_(wanted.statuses))
    if wanted.hardware is not None:
        found.append(Job.hardware == wanted.hardware)
    if wanted.created_after is not None:
        found.append(Job.created_at > wanted.created_after)
    if wanted.created_before is not None:
        found.append(Job.created_at < wanted.created_before)
    found += [_has(session, key, value) for key, value in wanted.metadata.items()]
    return found


def _has(session: Session, key: str, value: str) -> ColumnElement[bool]:
    """The request's metadata has this pair. As rows: no path can be injected."""
    if session.get_bind().dialect.name == "postgresql":
        pairs = func.json_each_text(Job.body["metadata"])
    else:
        pairs = func.json_each(Job.body, "$.metadata")
    rows = pairs.table_valued("key", "value", name="pairs")
    same = (rows.c.key == key, rows.c.value == value)
    return select(1).select_from(rows).where(*same).exists()
