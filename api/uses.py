"""Which files of a tenant its jobs that have not ended will read.

Uploads lie in a folder of the tenant, outside of the roots: no other one reads them.
"""

from typing import Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from api.models import FINAL, Job


def job_on(
    session: Session,
    tenant_id: str | None,
    field: Literal["model_path", "dataset_path"],
    path: str,
) -> str | None:
    """Return the id of a job of the tenant that reads this path. None: no job does."""
    query = select(Job.id).where(
        Job.tenant_id == tenant_id,
        Job.status.not_in(FINAL),
        Job.spec[field].as_string() == path,
    )
    return session.scalar(query.limit(1))
