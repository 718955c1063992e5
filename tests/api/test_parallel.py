"""What the config of a model says of devices and engines, before a worker reads it."""

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.api.conftest import BODY, CONFIG, Refused, write_model
from tests.api.test_estimate import SIZES

POINTER = "/workload/tensor_parallel"


@pytest.fixture
def own(data_dir: Path) -> None:
    """A shared model of two heads."""
    folder = write_model(data_dir / "models" / "own")
    (folder / "config.json").write_text(
        json.dumps({**CONFIG, **SIZES, "max_position_embeddings": 2048})
    )


def asked(**changes: Any) -> dict[str, Any]:
    return {**BODY, "model": "own", **changes}


@pytest.mark.usefixtures("own")
def test_a_job_keeps_how_many_devices_share_a_layer(client: TestClient) -> None:
    body = asked(hardware="h100", workload={"tensor_parallel": 2})
    answer = client.post("/v1/optimize", json=body)
    assert answer.status_code == 202, answer.text
    assert answer.json()["request"]["workload"]["tensor_parallel"] == 2


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("path", ["/v1/optimize", "/v1/estimate"])
@pytest.mark.parametrize(
    ("hardware", "ways", "code", "said"),
    [
        ("h100", 3, "unsupported_hardware", "2 attention heads"),
        ("t4", 2, "unsupported_hardware", "no link to 1 others"),
        ("h100", 0, "validation_error", ""),
        ("h100", 65, "validation_error", ""),
    ],
)
def test_what_devices_cannot_share_is_refused_at_once(
    client: TestClient,
    refused: Refused,
    path: str,
    hardware: str,
    ways: int,
    code: str,
    said: str,
) -> None:
    body = asked(hardware=hardware, workload={"tensor_parallel": ways})
    problem = refused(client.post(path, json=body), 422, code, POINTER)
    assert said in problem["errors"][0]["detail"]


@pytest.mark.usefixtures("own")
def test_local_is_one_device(client: TestClient, refused: Refused) -> None:
    body = asked(hardware="local", workload={"tensor_parallel": 2})
    answer = client.post("/v1/optimize", json=body)
    problem = refused(answer, 422, "unsupported_hardware", POINTER)
    assert "must be 1" in problem["errors"][0]["detail"]


def test_a_config_that_says_too_little_is_left_to_the_worker(
    client: TestClient, tiny: Path
) -> None:
    body = {**BODY, "hardware": "h100", "workload": {"tensor_parallel": 2}}
    assert client.post("/v1/optimize", json=body).status_code == 202


NEOX = {
    "architectures": ["GPTNeoXForCausalLM"],
    "model_type": "gpt_neox",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 2048,
}


def test_a_model_that_vllm_has_no_class_for_is_refused_at_once(
    client: TestClient, refused: Refused, data_dir: Path
) -> None:
    folder = write_model(data_dir / "models" / "neox")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **NEOX}))
    body = {**BODY, "model": "neox", "hardware": "h100", "engine": "vllm"}
    answer = client.post("/v1/optimize", json=body)
    problem = refused(answer, 422, "unsupported_hardware", "/engine")
    assert "exports without compressed_tensors" in problem["errors"][0]["detail"]
    answer = client.post("/v1/optimize", json={**body, "exports": ["torchao"]})
    assert answer.status_code == 202, answer.text
