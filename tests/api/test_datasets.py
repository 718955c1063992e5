"""Datasets that share a file, and the room that a tenant has for all it keeps."""

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from api import auth, db, jobs, storage
from api.models import Artifact
from api.settings import settings
from optimizer.spec import OptimizeSpec
from tests.api.conftest import Refused

LINES = b'{"text": "one"}\n{"text": "two"}\n'
OTHERS = LINES.replace(b"one", b"three")
JSONL = {"Content-Type": "application/jsonl"}


def put(client: TestClient, name: str, content: bytes = LINES) -> int:
    answer = client.put(f"/v1/datasets/{name}", content=content, headers=JSONL)
    return answer.status_code


@pytest.fixture
def reading(tiny: Path, client: TestClient, bells: list[str]) -> str:
    """A job that waits, and will read the dataset `first`."""
    assert put(client, "first") == 201
    asked = {"model": "tiny", "hardware": "h100", "data_distribution": "first"}
    answer = client.post("/v1/optimize", json=asked)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def files(data_dir: Path) -> list[Path]:
    return list((data_dir / "datasets").glob("*/*.jsonl"))


def test_a_name_that_a_job_reads_stays_and_another_of_the_same_file_goes(
    reading: str, client: TestClient, refused: Refused, data_dir: Path
) -> None:
    assert put(client, "second") == 201  # the same content, so the same file
    assert client.delete("/v1/datasets/second").status_code == 204
    problem = refused(client.delete("/v1/datasets/first"), 409, "in_use")
    assert reading in problem["detail"]
    assert len(files(data_dir)) == 1
    client.post(f"/v1/jobs/{reading}/cancel")
    assert client.delete("/v1/datasets/first").status_code == 204
    assert files(data_dir) == []


def test_a_file_that_a_job_reads_outlives_its_last_name(
    reading: str, client: TestClient, data_dir: Path
) -> None:
    assert put(client, "second") == 201
    assert put(client, "first", OTHERS) == 200  # the job goes on with the old one
    assert client.delete("/v1/datasets/second").status_code == 204
    assert len(files(data_dir)) == 2


def test_what_jobs_left_counts_in_the_tenants_storage(
    client: TestClient,
    key: str,
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRECISION_TENANT_STORAGE_BYTES", "1000")
    settings.cache_clear()
    with db.transaction() as session:
        tenant = auth.verify(session, f"Bearer {key}").tenant_id
        spec = OptimizeSpec("tiny", "/models/tiny", "0" * 64, "h100")
        job_id = jobs.submit(session, tenant, spec).id
        claim = jobs.claim(session, job_id, "worker-1")
        assert claim is not None
        left = [storage.put(job_id, 1, "report.json", b"x" * 980)]
        jobs.succeed(session, claim, "sla_met", {}, left)
    assert client.get("/v1/limits").json()["uploads"]["storage_used_bytes"] == 980
    used = client.get("/v1/usage").json()["storage"]
    assert (used["uploads_bytes"], used["artifacts_bytes"]) == (0, 980)
    answer = client.put("/v1/datasets/mine", content=LINES, headers=JSONL)
    problem = refused(answer, 413, "storage_quota_exceeded")
    assert problem["used_bytes"] == 980
    with db.transaction() as session:
        file = session.get(Artifact, (job_id, "report.json"))
        assert file is not None
        file.purged_at = file.created_at
    assert put(client, "mine") == 201
