"""Settings under which a lost worker is noticed soon."""

import secrets

import pytest

from api import auth, db, jobs, settings
from optimizer.spec import OptimizeSpec


@pytest.fixture
def patient(database: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Leases end when a test says so; a machine that is busy ends none."""
    for name, value in {
        "PRECISION_LEASE_S": "60",
        "PRECISION_BEAT_S": "0.2",
        "PRECISION_SANDBOX": "off",
        "PRECISION_MAX_RUNNING": "100",
        "PRECISION_MAX_QUEUED": "100",
    }.items():
        monkeypatch.setenv(name, value)
    settings.settings.cache_clear()
    return database


def submit(tenth_s: int = 0, **columns: object) -> str:
    """Queue a job that takes so many tenths of a second, and reads nobody's results."""
    model = secrets.token_hex(32)
    spec = OptimizeSpec("tiny", "/models/tiny", model, "h100", seed=tenth_s)
    with db.transaction() as session:
        job = jobs.submit(session, auth.tenant_named(session, "acme").id, spec)
        for name, value in columns.items():
            setattr(job, name, value)
        return job.id
