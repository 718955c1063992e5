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
    data_distribution: str | None = None,
) -> str | None:
    """Return the id of a job of the tenant that reads this path. None: no job does.

    `data_distribution` asks for jobs alone that named the data so: several names may
    stand for one file.
    """
    query = select(Job.id).where(
        Job.tenant_id == tenant_id,
        Job.status.not_in(FINAL),
        Job.spec[field].as_string() == path,
    )
    if data_distribution is not None:
        named = Job.spec["data_distribution"].as_string() == data_distribution
        query = query.where(named)
    return session.scalar(query.limit(1))
