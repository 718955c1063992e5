"""What is kept, and for how long: files of jobs go when their time is over.

The row of an artifact stays and says when its bytes went. Safe to run anywhere, and in
many processes at once.
"""

import structlog
from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from api import storage
from api.db import reading, transaction
from api.models import Artifact, EndedSession, IdempotencyKey
from api.transitions import now

JOBS_AT_ONCE = 100

log = structlog.get_logger()


def purge_artifacts() -> int:
    """Delete the bytes of artifacts that have expired. Return how many jobs had some.

    The bytes go first: what is interrupted in between is found again, and deleting
    twice is no error. A storage that does not answer leaves the rest for later.
    """
    with reading() as session:
        over = Artifact.expires_at < now(session)
        query = select(Artifact.job_id).where(over, Artifact.purged_at.is_(None))
        found = list(session.scalars(query.distinct().limit(JOBS_AT_ONCE)))
    for count, job_id in enumerate(found):
        try:
            forget(job_id)
        except OSError:
            log.warning("purge_stopped", job_id=job_id, exc_info=True)
            return count
    return len(found)


def forget(job_id: str) -> None:
    """Delete the bytes of a job's artifacts, also what lost attempts left."""
    storage.remove_job(job_id)
    with transaction() as session:
        session.execute(
            update(Artifact)
            .where(Artifact.job_id == job_id, Artifact.purged_at.is_(None))
            .values(purged_at=now(session))
            .execution_options(synchronize_session=False)
        )


def purge_promises(session: Session) -> int:
    """Forget the keys that have expired, and return how many there were."""
    old = delete(IdempotencyKey).where(IdempotencyKey.expires_at <= now(session))
    return len(list(session.scalars(old.returning(IdempotencyKey.key))))


def purge_sessions(session: Session) -> int:
    """Forget the sessions that would have ended by themselves, and return how many."""
    old = delete(EndedSession).where(EndedSession.expires_at <= now(session))
    return len(list(session.scalars(old.returning(EndedSession.sha256))))
