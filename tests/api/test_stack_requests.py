"""A stack.json that comes with a request: taken, or refused with every fault named."""

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api import stack_requests
from tests.api.conftest import BODY, Refused
from tests.service import eventually, tiny_model

COMPONENTS = (
    *("attn_qkv", "kv_cache", "attn_scores", "attn_softmax", "attn_values"),
    *("attn_out", "ffn_in", "ffn_act", "ffn_out", "norms"),
)


pytestmark = pytest.mark.usefixtures("model")  # there before the service starts


@pytest.fixture
def model(data_dir: Path) -> Path:
    return tiny_model(data_dir / "models" / "tiny")


@pytest.fixture
def file(client: TestClient) -> dict[str, Any]:
    """A stack.json of the tiny model, all of it in bf16."""
    assert eventually(lambda: client.get("/v1/models").json()["data"])
    model = client.get("/v1/models/tiny").json()
    sites = [f"layers.{n}.{c}" for n in range(2) for c in COMPONENTS]
    return {
        "schema": "precision.stack/1",
        "model": {"name": "tiny", "sha256": model["sha256"]},
        "hardware": "h100",
        "stack": dict.fromkeys([*sites, "embeddings", "norms", "lm_head"], "bf16"),
    }


@pytest.mark.parametrize("use", [None, "validate", "start"])
def test_a_jobs_own_stack_is_taken_in_both_spellings(
    client: TestClient, file: dict[str, Any], use: str | None
) -> None:
    file["stack"]["layers.1.ffn_out"] = "fp8_e4m3_token"
    stack = file if use is None else {"file": file, "use": use}
    answer = client.post("/v1/optimize", json={**BODY, "stack": stack})
    assert answer.status_code == 202
    request = client.get(answer.headers["location"]).json()["request"]
    assert request["stack"] == file["stack"]
    assert request["stack_use"] == (use or "validate")


def test_formats_and_rounding_are_those_of_the_stack(
    client: TestClient, file: dict[str, Any]
) -> None:
    file["stack"]["layers.1.ffn_out"] = "int8"
    file["rounding"] = "compensated"
    answer = client.post("/v1/optimize", json={**BODY, "stack": file})
    request = client.get(answer.headers["location"]).json()["request"]
    assert "int8" in request["formats"]
    assert request["rounding"] == "compensated"


def test_every_fault_is_named_by_where_it_is(
    client: TestClient, refused: Refused, file: dict[str, Any]
) -> None:
    file["stack"] |= {"layers.0.nose": "bf16", "lm_head": "fp9"}
    file["extra"] = 1
    answer = client.post("/v1/optimize", json={**BODY, "stack": file})
    problem = refused(answer, 422, "bad_stack")
    said = {e["pointer"]: e["detail"] for e in problem["errors"]}
    assert said.keys() == {
        "/stack/file/extra",
        "/stack/file/stack/layers.0.nose",
        "/stack/file/stack/lm_head",
    }
    assert "it has fp32, bf16" in said["/stack/file/stack/lm_head"]


def test_a_stack_of_another_model_is_refused(
    client: TestClient, refused: Refused, file: dict[str, Any]
) -> None:
    file["model"] = {"name": "other", "sha256": "b" * 64}
    del file["stack"]["layers.0.norms"]
    file["stack"]["layers.7.norms"] = "bf16"
    answer = client.post("/v1/optimize", json={**BODY, "stack": file})
    errors = refused(answer, 422, "bad_stack")["errors"]
    assert [e["pointer"].removeprefix(stack_requests.FILE) for e in errors] == [
        "/model/sha256",
        "/stack/layers.7.norms",
        "/stack/layers.0.norms",
    ]
    assert "made for the model bbbbbbbbbbbb… (other)" in errors[0]["detail"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hardware": "a100"}, "has no FP8 matmul"),
        ({"engine": "vllm"}, "compressed-tensors, which vLLM loads"),
    ],
)
def test_what_cannot_run_there_is_refused_with_the_reason(
    client: TestClient,
    refused: Refused,
    file: dict[str, Any],
    change: dict[str, Any],
    said: str,
) -> None:
    file["stack"]["layers.1.ffn_out"] = "fp8_e5m2"
    answer = client.post("/v1/optimize", json={**BODY, **change, "stack": file})
    (error,) = refused(answer, 422, "bad_stack")["errors"]
    assert error["pointer"].endswith("/layers.1.ffn_out")
    assert said in error["detail"]


def test_a_use_that_there_is_not_comes_with_what_there_is(
    client: TestClient, refused: Refused, file: dict[str, Any]
) -> None:
    body = {**BODY, "stack": {"file": file, "use": "frame"}}
    problem = refused(
        client.post("/v1/optimize", json=body), 422, "unknown_use", "/stack/use"
    )
    assert problem["errors"][0]["known"] == ["validate", "start"]
