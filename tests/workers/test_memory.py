"""A model that is too large for its process at first, with the numerics and all."""

from pathlib import Path

import pytest

from api import auth, db, jobs, settings
from api.models import Artifact, Job, JobEvent, Status
from optimizer import checkpoint
from optimizer.spec import OptimizeSpec
from tests import service
from workers.tasks import run_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# With its weights in memory the job takes 720 MiB, of which torch takes 310; 410 where
# it reads them layer by layer.
LIMIT_BYTES = 540 << 20


def test_a_job_that_meets_its_limit_is_run_again_in_less_and_finishes(
    sqlite: Path, bells: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"HIDDEN": 512, "FFN": 1024, "LAYERS": 6}.items():
        monkeypatch.setattr(service, name, value)
    model = service.tiny_model(sqlite / "models" / "wide")
    monkeypatch.setenv("PRECISION_JOB_MEMORY_BYTES", str(LIMIT_BYTES))
    settings.settings.cache_clear()
    spec = OptimizeSpec(
        "wide",
        str(model),
        checkpoint.fingerprint(model),
        "h100",
        formats=("bf16", "fp8_e4m3"),
        calibration_tokens=256,
        validation_tokens=256,
        sequence_tokens=128,
        exports=(),
    )
    with db.transaction() as session:
        tenant = auth.tenant_named(session, "acme").id
        job_id = jobs.submit(session, tenant, spec).id
    run_job(job_id)
    with db.reading() as session:
        job = session.get_one(Job, job_id)
        events = session.query(JobEvent).filter_by(job_id=job_id).all()
        names = {a.name for a in session.query(Artifact).filter_by(job_id=job_id)}
    assert (job.status, job.attempt) == (Status.SUCCEEDED, 1), job.error
    [warning] = [e.details for e in events if e.type == "job.warning"]
    assert warning["code"] == "run_with_less_memory"
    assert {"report.json", "stack.json"} <= names
