"""Files of jobs go when their time is over; what they were stays known."""

from datetime import timedelta
from pathlib import Path

import pytest

from api import auth, jobs, retention, storage
from api.db import reading, transaction
from api.models import Artifact
from api.transitions import now
from tests.api.test_jobs import SPEC


def finished() -> str:
    with transaction() as session:
        owner = auth.tenant_named(session, "acme")
        job = jobs.submit(session, owner.id, SPEC)
        claim = jobs.claim(session, job.id, "worker-1")
        assert claim is not None
        storage.put(job.id, 9, "left.txt", b"of an attempt that was lost")
        stored = [storage.put(job.id, 1, "a.txt", b"x")]
        jobs.succeed(session, claim, "sla_met", {}, stored)
    return job.id


def expire(job_id: str) -> None:
    with transaction() as session:
        for row in session.query(Artifact).where(Artifact.job_id == job_id):
            row.expires_at = now(session) - timedelta(seconds=1)


def rows(job_id: str) -> list[Artifact]:
    with reading() as session:
        return list(session.query(Artifact).where(Artifact.job_id == job_id))


def test_only_what_has_expired_goes(database: str, data_dir: Path) -> None:
    old, young = finished(), finished()
    assert retention.purge_artifacts() == 0
    expire(old)
    assert retention.purge_artifacts() == 1
    assert retention.purge_artifacts() == 0
    assert not (data_dir / "artifacts" / old).exists()  # with what a lost attempt left
    (row,) = rows(old)
    assert row.purged_at is not None
    assert row.sha256
    (kept,) = rows(young)
    assert kept.purged_at is None
    assert storage.store().read(storage.key(young, 1, "a.txt")) == b"x"


def test_a_storage_that_is_away_is_tried_again(
    database: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = finished()
    expire(old)

    def away(*_: object) -> None:
        raise storage.StorageUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(storage.Local, "remove", away)
        assert retention.purge_artifacts() == 0
        assert rows(old)[0].purged_at is None
    assert retention.purge_artifacts() == 1
