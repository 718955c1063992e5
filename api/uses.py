"""Which files the jobs that have not ended will read."""

from typing import Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from api.models import FINAL, Job


def job_on(
    session: Session, field: Literal["model_path", "dataset_path"], path: str
) -> str | None:
    """Return the id of a job that reads this path. None: no job does."""
    query = select(Job.id).where(
        Job.status.not_in(FINAL), Job.spec[field].as_string() == path
    )
    return session.scalar(query.limit(1))
