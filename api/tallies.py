"""Sums over all tenants' jobs, for whoever watches the service. Reads only.

They come from the database when asked, so that every replica says the same, and what
workers did is counted although nobody scrapes a worker.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Double, and_, case, cast, func, select
from sqlalchemy.orm import Session

from api.models import FINAL, HELD, Job, Status


class Finished(NamedTuple):
    """How many jobs ended in one way on one device."""

    status: str
    outcome: str
    hardware: str
    total: int


class Load(NamedTuple):
    """Jobs for one device that have not ended."""

    queued: int = 0
    running: int = 0


class Times(NamedTuple):
    """A cumulative histogram: how many took at most each bound, and all together."""

    at_most: tuple[int, ...]
    total: int
    sum_s: float


def by_status(session: Session) -> dict[str, int]:
    """Return how many jobs are in each state, of all tenants."""
    rows = session.execute(select(Job.status, func.count()).group_by(Job.status))
    found = {status.value: count for status, count in rows}
    return {status.value: found.get(status.value, 0) for status in Status}


def finished(session: Session) -> list[Finished]:
    """Return how the jobs ended, by device."""
    outcome = func.coalesce(Job.outcome, "none")
    query = (
        select(Job.status, outcome, Job.hardware, func.count())
        .where(Job.status.in_(FINAL))
        .group_by(Job.status, outcome, Job.hardware)
    )
    return [
        Finished(row[0].value, row[1], row[2], row[3]) for row in session.execute(query)
    ]


def queued(session: Session) -> dict[str, int]:
    """Return how many jobs wait, by device."""
    found = loads(session).items()
    return {device: load.queued for device, load in found if load.queued}


def loads(session: Session) -> dict[str, Load]:
    """Return how many jobs wait and run, by device, of all tenants."""
    waits = func.sum(case((Job.status == Status.QUEUED, 1), else_=0))
    live = Job.status.in_((Status.QUEUED, *HELD))
    query = select(Job.hardware, waits, func.count()).where(live)
    rows = session.execute(query.group_by(Job.hardware))
    return {row[0]: Load(int(row[1]), row[2] - int(row[1])) for row in rows}


def oldest_wait_s(session: Session, at: Any) -> float:
    """Return how long the job that waits longest has been waiting; 0: none waits."""
    query = select(func.min(Job.queued_at)).where(Job.status == Status.QUEUED)
    since = session.scalar(query)
    return max((at - since).total_seconds(), 0.0) if since else 0.0


def attempts_lost(session: Session) -> int:
    """Return how many attempts ended because a worker fell silent."""
    return int(session.scalar(select(func.sum(Job.attempts_lost))) or 0)


def waits(session: Session, bounds_s: Sequence[float]) -> Times:
    """Return how long jobs waited for their first worker."""
    return _times(session, Job.created_at, Job.started_at, bounds_s)


def runs(session: Session, bounds_s: Sequence[float]) -> Times:
    """Return how long jobs ran, from their first worker to their end."""
    return _times(session, Job.started_at, Job.finished_at, bounds_s)


def _times(
    session: Session,
    since: ColumnElement[Any] | Any,
    until: ColumnElement[Any] | Any,
    bounds_s: Sequence[float],
) -> Times:
    took_s = seconds(session, since, until)
    within = [func.sum(case((took_s <= bound, 1), else_=0)) for bound in bounds_s]
    both = and_(since.is_not(None), until.is_not(None))
    row = session.execute(select(func.count(), func.sum(took_s), *within).where(both))
    count, total_s, *at_most = row.one()
    return Times(tuple(int(n or 0) for n in at_most), int(count), float(total_s or 0))


def seconds(session: Session, since: Any, until: Any) -> ColumnElement[float]:
    """Return the seconds between two columns; null where one is."""
    if session.get_bind().dialect.name == "postgresql":
        return cast(func.extract("epoch", until - since), Double)
    return (func.julianday(until) - func.julianday(since)) * 86_400.0
