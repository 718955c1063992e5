"""What there is: models and datasets."""

import re
import time
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient

from api import auth, catalog, db, ids
from optimizer.datasets import DISTRIBUTIONS
from tests.api.conftest import BODY, Refused, write_model

LINES = b'{"text": "one"}\n{"text": "two"}\n{"messages": [{"role": "user", "content": "3"}]}\n'
JSONL = {"Content-Type": "application/x-ndjson"}


def test_folders_are_registered_for_everybody_at_the_start(
    tiny: Path, client: TestClient
) -> None:
    end = time.monotonic() + 30
    while not (listed := client.get("/v1/models").json()["data"]):
        assert time.monotonic() < end
        time.sleep(0.02)
    (model,) = listed
    assert (model["name"], model["shared"], model["parameters"]) == ("tiny", True, 128)
    assert model["dtypes"] == {"F32": 512}
    assert "path" not in model
    assert re.fullmatch(rf"mdl_{ids.PATTERN}", model["id"])


def test_a_shared_model_that_changes_is_registered_anew(
    tiny: Path, client: TestClient
) -> None:
    def sha256() -> str:
        catalog.register_folders()
        return str(client.get("/v1/models").json()["data"][0]["sha256"])

    before = sha256()
    assert sha256() == before
    (tiny / "generation_config.json").write_text("{}")
    assert sha256() != before


def test_a_registered_name_is_used_and_may_be_renewed(
    data_dir: Path, client: TestClient
) -> None:
    folder = write_model(data_dir / "models" / "nested" / "weights")
    body = {"name": "qwen2-7b", "path": str(folder)}
    first = client.post("/v1/models", json=body)
    assert first.status_code == 201
    job = client.post("/v1/optimize", json={**BODY, "model": "qwen2-7b"}).json()
    assert job["request"]["model"] == "qwen2-7b"
    assert job["request"]["model_sha256"] == first.json()["sha256"]
    assert client.post("/v1/models", json=body).status_code == 200
    assert len(client.get("/v1/models").json()["data"]) == 1


def test_own_names_come_before_shared_ones(
    tiny: Path, data_dir: Path, client: TestClient
) -> None:
    other = np.zeros((4, 4), dtype=np.float32)
    folder = write_model(data_dir / "models" / "mine", **{"model.x.weight": other})
    mine = client.post("/v1/models", json={"name": "tiny", "path": str(folder)}).json()
    job = client.post("/v1/optimize", json=BODY).json()
    assert job["request"]["model_sha256"] == mine["sha256"]


def test_models_and_datasets_of_another_tenant_do_not_exist(
    data_dir: Path, tiny: Path, client: TestClient, refused: Refused
) -> None:
    folder = write_model(data_dir / "models" / "nested" / "weights")
    body = {"name": "secret-model", "path": str(folder)}
    assert client.post("/v1/models", json=body).status_code == 201
    client.put("/v1/datasets/secret-data", content=LINES, headers=JSONL)
    with db.transaction() as session:
        key = auth.create_key(session, "other", "test")
    headers = {"Authorization": f"Bearer {key}"}
    for change, code in [
        ({"model": "secret-model"}, "unknown_model"),
        ({"data_distribution": "secret-data"}, "unknown_data_distribution"),
    ]:
        answer = client.post("/v1/optimize", json={**BODY, **change}, headers=headers)
        problem = refused(answer, 422, code)
        assert not [n for n in problem["errors"][0]["known"] if "secret" in n]
    for path in ("/v1/models", "/v1/datasets"):
        assert "secret" not in client.get(path, headers=headers).text


def test_datasets_are_the_built_in_and_ones_own(
    tiny: Path, client: TestClient, data_dir: Path
) -> None:
    answer = client.put("/v1/datasets/mine", content=LINES, headers=JSONL)
    dataset = answer.json()
    assert (answer.status_code, dataset["samples"]) == (201, 3)
    assert dataset["bytes"] == len(LINES)
    listed = client.get("/v1/datasets").json()["data"]
    assert [d["name"] for d in listed] == [*DISTRIBUTIONS, "mine"]
    body = {**BODY, "data_distribution": {"dataset_id": "mine"}}
    request = client.post("/v1/optimize", json=body).json()["request"]
    assert request["data_distribution"] == "mine"


def test_a_job_keeps_the_upload_that_it_was_sent_with(
    tiny: Path, client: TestClient
) -> None:
    client.put("/v1/datasets/mine", content=LINES, headers=JSONL)
    body = {**BODY, "data_distribution": "mine"}
    job_id = client.post("/v1/optimize", json=body).json()["id"]
    again = client.put(
        "/v1/datasets/mine", content=LINES * 2 + b'{"text": "4"}', headers=JSONL
    )
    assert again.status_code == 200
    with db.reading() as session:
        from api.models import Job

        job = session.get(Job, job_id)
        assert job is not None
        path = Path(job.spec["dataset_path"])
    assert path.read_bytes() == LINES


@pytest.mark.parametrize("path", ["/v1/models", "/v1/datasets", "/v1/hardware"])
def test_lists_have_one_shape(client: TestClient, path: str) -> None:
    listed = client.get(path).json()
    assert listed["object"] == "list"
    assert (listed["has_more"], listed["next_cursor"]) == (False, None)
