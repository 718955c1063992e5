"""A model folder that cannot be used is refused by the file, and stops nothing."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from api.app import create_app
from tests.api.conftest import BODY, CONFIG, Refused, write_model

pytestmark = pytest.mark.usefixtures("nothing_is_queued")


def broken_models(root: Path) -> dict[str, tuple[Path, str]]:
    """Return, by kind, a folder and what the refusal must name."""
    pickled = write_model(root / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    coded = write_model(root / "coded")
    (coded / "config.json").write_text(json.dumps({**CONFIG, "auto_map": {"a": "b.C"}}))
    strange = write_model(root / "strange")
    (strange / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    sharded = write_model(root / "sharded")
    (sharded / "model.safetensors").rename(sharded / "model-00001-of-00002.safetensors")
    shards = {"lm_head.weight": "model-00001-of-00002.safetensors"}
    shards["norm.weight"] = "model-00002-of-00002.safetensors"
    index = json.dumps({"weight_map": shards})
    (sharded / "model.safetensors.index.json").write_text(index)
    broken = np.array([1.0, np.nan], dtype=np.float32)
    sick = write_model(root / "sick", **{"model.norm.weight": broken})
    renamed = write_model(root / "renamed")
    (renamed / "model.safetensors").write_bytes(pickle.dumps({"w": 1}) + bytes(100))
    linked = write_model(root / "linked")
    (linked / "generation_config.json").symlink_to("/etc/hostname")
    empty = root / "empty"
    empty.mkdir()
    return {
        "pickle": (pickled, "pytorch_model.bin"),
        "renamed pickle": (renamed, "model.safetensors is refused: it is not"),
        "link": (linked, "generation_config.json is a link"),
        "remote code": (coded, "auto_map"),
        "architecture": (strange, "MambaForCausalLM"),
        "missing shard": (sharded, "model-00002-of-00002.safetensors"),
        "NaN": (sick, "model.norm.weight"),
        "no files": (empty, "config.json"),
    }


@pytest.mark.parametrize(
    "kind",
    [
        "pickle",
        "renamed pickle",
        "link",
        "remote code",
        "architecture",
        "missing shard",
        "NaN",
        "no files",
    ],
)
def test_a_bad_model_folder_is_refused_by_file(
    client: TestClient, refused: Refused, data_dir: Path, kind: str
) -> None:
    folder, named = broken_models(data_dir / "models" / "broken")[kind]
    codes = {"NaN": "non_finite", "pickle": "unsupported_model_format"}
    codes["renamed pickle"] = "unsupported_model_format"
    code = codes.get(kind, "model_load_failed")
    answer = client.post("/v1/optimize", json={**BODY, "model": {"path": str(folder)}})
    problem = refused(answer, 422, code, "/model/path")
    assert named in problem["detail"]
    answer = client.post("/v1/models", json={"name": "m", "path": str(folder)})
    refused(answer, 422, code, "/path")


@pytest.mark.parametrize("field", ["max_position_embeddings", "n_positions"])
def test_sequences_longer_than_the_model_takes_are_refused(
    client: TestClient, refused: Refused, data_dir: Path, field: str
) -> None:
    folder = write_model(data_dir / "staged")
    (folder / "config.json").write_text(json.dumps({**CONFIG, field: 128}))
    # Whole at once: the service may be reading the shared folders just now.
    folder.rename(data_dir / "models" / "short")
    data = {"name": "web_text", "sequence_tokens": 129}
    for change in ({}, {"data_distribution": data}):
        answer = client.post("/v1/optimize", json={**BODY, "model": "short", **change})
        problem = refused(answer, 422, "validation_error", "/data_distribution")
        assert "short takes at most 128 tokens" in problem["detail"]


def test_a_folder_outside_the_roots_is_as_good_as_not_there(
    client: TestClient, refused: Refused, data_dir: Path, tmp_path_factory: Any
) -> None:
    outside = write_model(tmp_path_factory.mktemp("outside") / "m")
    link = data_dir / "models" / "link"
    link.symlink_to(outside)
    relative = os.path.relpath(data_dir / "models" / "tiny")
    details = set()
    for path in (outside, link, "/nowhere", f"{data_dir}/models/../..", relative):
        answer = client.post(
            "/v1/optimize", json={**BODY, "model": {"path": str(path)}}
        )
        problem = refused(answer, 422, "model_folder_not_allowed", "/model/path")
        details.add(problem["detail"])
    (detail,) = details
    assert "PRECISION_MODEL_ROOTS" in detail


def test_a_model_that_changed_or_vanished_is_named(
    client: TestClient, refused: Refused, data_dir: Path
) -> None:
    folder = write_model(data_dir / "models" / "mine")
    body = {"name": "my-model", "path": str(folder)}
    assert client.post("/v1/models", json=body).status_code == 201
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 17}))
    for why in ("changed", "gone"):
        answer = client.post("/v1/optimize", json={**BODY, "model": "my-model"})
        problem = refused(answer, 422, "model_load_failed", "/model")
        assert "my-model" in problem["detail"]
        assert why in problem["detail"]
        shutil.rmtree(folder, ignore_errors=True)


def test_one_bad_folder_does_not_stop_the_start(
    client: TestClient, data_dir: Path, key: str
) -> None:
    bad = write_model(data_dir / "models" / "bad")
    (bad / "model.safetensors").write_bytes(b"junk")
    with TestClient(create_app(), headers={"Authorization": f"Bearer {key}"}) as again:
        assert again.get("/readyz").status_code == 200


@pytest.mark.parametrize("name", ["", "a b", "../x", ".x", "x" * 64, "é"])
def test_a_bad_name_of_a_model_is_refused(
    client: TestClient, refused: Refused, tiny: Path, name: str
) -> None:
    answer = client.post("/v1/models", json={"name": name, "path": str(tiny)})
    refused(answer, 422, "validation_error", "/name")
