"""What is not a request is refused by name, leaves no row, and stops nothing."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from api import settings
from api.app import create_app
from api.schemas import MAX_SLA_S
from tests.api.conftest import BODY, CONFIG, Refused, jobs_in_database, write_model
from tests.service import eventually

NAN = float("nan")
INF = float("inf")


@pytest.fixture(autouse=True)
def _nothing_is_queued(
    tiny: Path, client: TestClient, bells: list[str]
) -> Iterator[None]:
    yield
    assert jobs_in_database() == 0
    assert bells == []
    assert client.get("/livez").status_code == 200


def post(client: TestClient, body: Any) -> Any:
    """Send JSON as Python writes it: NaN and Infinity too."""
    headers = {"Content-Type": "application/json"}
    return client.post("/v1/optimize", content=json.dumps(body), headers=headers)


@pytest.mark.parametrize("value", [-1, 0, -0.0, NAN, INF, -INF, 1e9, MAX_SLA_S + 1])
def test_an_absurd_sla_is_refused_where_it_was_written(
    client: TestClient, refused: Refused, value: float
) -> None:
    answer = post(client, {**BODY, "latency_sla": value})
    refused(answer, 422, "validation_error", "/latency_sla")
    answer = post(client, {**BODY, "latency_sla": {"first_token_s": value}})
    refused(answer, 422, "validation_error", "/latency_sla/first_token_s")


def test_a_number_too_large_for_a_float_is_infinite(
    client: TestClient, refused: Refused
) -> None:
    body = '{"model":"tiny","hardware":"h100","latency_sla":1e999}'
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/optimize", content=body, headers=headers)
    refused(answer, 422, "validation_error", "/latency_sla")


@pytest.mark.parametrize(
    ("pointer", "change"),
    [
        ("/model", {"model": None}),
        ("/model", {"model": 7}),
        ("/model", {"model": ""}),
        ("/model", {"model": "m" * 200}),
        ("/model", {"model": {}}),
        ("/model", {"model": {"id": "a", "path": "/b"}}),
        ("/model/uri", {"model": {"id": "a", "uri": "s3://b"}}),
        ("/hardware", {"hardware": ["h100"]}),
        ("/latency_sla", {"latency_sla": "fast"}),
        ("/latency_sla", {"latency_sla": True}),
        ("/latency_sla", {"latency_sla": {}}),
        ("/latency_sla/percentile", {"latency_sla": {"percentile": "p50"}}),
        ("/latency_sla/per_token_s", {"latency_sla": {"per_token_s": "0.02"}}),
        ("/workload/batch_size", {"workload": {"batch_size": 0}}),
        ("/workload/batch_size", {"workload": {"batch_size": 1025}}),
        ("/workload/batch_size", {"workload": {"batch_size": 1.5}}),
        ("/workload/batch_size", {"workload": {"batch_size": True}}),
        ("/workload/prompt_tokens", {"workload": {"prompt_tokens": 131_073}}),
        ("/workload/output_tokens", {"workload": {"output_tokens": -5}}),
        ("/workload", {"workload": 4}),
        ("/data_distribution", {"data_distribution": 4}),
        (
            "/data_distribution/seed",
            {"data_distribution": {"name": "chat", "seed": -1}},
        ),
        (
            "/data_distribution/calibration_tokens",
            {"data_distribution": {"name": "chat", "calibration_tokens": 10**9}},
        ),
        (
            "/data_distribution",
            {"data_distribution": {"name": "chat", "sequence_tokens": 4096}},
        ),
        ("/search/formats", {"search": {"formats": []}}),
        ("/search/formats/1", {"search": {"formats": ["bf16", 8]}}),
        ("/search/formats", {"search": {"formats": ["bf16"] * 17}}),
        ("/max_memory_bytes", {"max_memory_bytes": 0}),
        ("/max_memory_bytes", {"max_memory_bytes": 2**60}),
        ("/metadata", {"metadata": {str(i): "" for i in range(17)}}),
        ("/metadata/a", {"metadata": {"a": "x" * 513}}),
        ("/metadata/a", {"metadata": {"a": NAN}}),
        ("/metadata/a~1b", {"metadata": {"a/b": 1}}),
        ("/colour", {"colour": "red"}),
        ("/engine", {"engine": "vllm", "search": {"engine": "torchao"}}),
    ],
)
def test_a_bad_field_is_named(
    client: TestClient, refused: Refused, pointer: str, change: dict[str, Any]
) -> None:
    refused(post(client, {**BODY, **change}), 422, "validation_error", pointer)


@pytest.mark.parametrize("field", ["model", "hardware"])
def test_a_missing_field_is_named(
    client: TestClient, refused: Refused, field: str
) -> None:
    body = {key: value for key, value in BODY.items() if key != field}
    refused(post(client, body), 422, "validation_error", f"/{field}")


@pytest.mark.parametrize(
    ("pointer", "code", "known", "change"),
    [
        ("/model", "unknown_model", "tiny", {"model": "huge"}),
        ("/model", "unknown_model", "tiny", {"model": "../models/tiny"}),
        ("/hardware", "unknown_hardware", "h100", {"hardware": "tpu-9"}),
        ("/task", "unknown_task", "chat", {"task": "dance"}),
        ("/engine", "unknown_engine", "vllm", {"engine": "steam"}),
        (
            "/data_distribution",
            "unknown_data_distribution",
            "web_text",
            {"data_distribution": "tea_leaves"},
        ),
        (
            "/search/formats/1",
            "unknown_format",
            "fp8_e4m3",
            {"search": {"formats": ["bf16", "fp3"]}},
        ),
        ("/search/engine", "unknown_engine", "any", {"search": {"engine": "x"}}),
        (
            "/search/rounding",
            "unknown_rounding",
            "compensated",
            {"search": {"rounding": "up"}},
        ),
    ],
)
def test_an_unknown_name_comes_with_what_there_is(
    client: TestClient,
    refused: Refused,
    pointer: str,
    code: str,
    known: str,
    change: dict[str, Any],
) -> None:
    # the service reads shared folders while it already answers
    assert eventually(lambda: client.get("/v1/models").json()["data"])
    problem = refused(post(client, {**BODY, **change}), 422, code, pointer)
    assert known in problem["errors"][0]["known"]
    assert known in problem["detail"]


@pytest.mark.parametrize(
    ("field", "value", "detail"),
    [
        ("model", 7, "must be a name or an object"),
        ("hardware", None, "must be a name or an object"),
        ("latency_sla", "fast", "must be a number of seconds or an object"),
        ("workload", 8, "must be an object"),
        ("metadata", None, "must be an object"),
    ],
)
def test_a_value_of_the_wrong_kind_is_told_the_right_ones(
    client: TestClient, refused: Refused, field: str, value: object, detail: str
) -> None:
    answer = post(client, {**BODY, field: value})
    problem = refused(answer, 422, "validation_error", f"/{field}")
    assert problem["errors"][0]["detail"] == detail


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 422, "validation_error"),
        (b"{", 400, "malformed_json"),
        (b"null", 422, "validation_error"),
        (b"[]", 422, "validation_error"),
        (b'"model"', 422, "validation_error"),
        (b"\xff\xfe{}", 400, "malformed_json"),
        (json.dumps(BODY).encode("utf-16"), 400, "malformed_json"),
        (b"\xef\xbb\xbf{}", 400, "malformed_json"),
        (b'{"model":"a","model":"tiny","hardware":"h100"}', 400, "malformed_json"),
        (b'{"model":"\\ud800","hardware":"h100"}', 400, "malformed_json"),
        (b'{"model":"a\\u0000","hardware":"h100"}', 400, "malformed_json"),
        (b'{"\\u0000":1}', 400, "malformed_json"),
        (b"[" * 100_000, 400, "malformed_json"),
        (b'{"a":' * 50 + b"1" + b"}" * 50, 400, "malformed_json"),
        (b"1" * 5000, 400, "malformed_json"),
    ],
)
def test_a_body_that_is_not_an_object_in_json_is_refused(
    client: TestClient, refused: Refused, body: bytes, status: int, code: str
) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    answer = client.post("/v1/optimize", content=body, headers=headers)
    refused(answer, status, code)


@pytest.mark.parametrize("kind", ["text/plain", "application/xml", ""])
def test_a_body_of_another_type_is_refused(
    client: TestClient, refused: Refused, kind: str
) -> None:
    answer = client.post(
        "/v1/optimize", content=json.dumps(BODY), headers={"Content-Type": kind}
    )
    refused(answer, 415, "unsupported_media_type")


def test_a_large_body_is_refused_by_its_length_and_by_count(
    client: TestClient, refused: Refused
) -> None:
    limit = settings.settings().max_body_bytes
    body = json.dumps({**BODY, "model": "x" * limit}).encode()
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/optimize", content=body, headers=headers)
    assert refused(answer, 413, "body_too_large")["limit_bytes"] == limit

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(body), 65_536):
            yield body[start : start + 65_536]

    answer = client.post("/v1/optimize", content=chunks(), headers=headers)
    assert "content-length" not in answer.request.headers
    refused(answer, 413, "body_too_large")


def test_what_was_sent_is_not_sent_back(client: TestClient, refused: Refused) -> None:
    body = {**BODY, "latency_sla": "hunter2", "metadata": {"password": 7}}
    answer = post(client, body)
    refused(answer, 422, "validation_error")
    assert "hunter2" not in answer.text


# -- model folders -------------------------------------------------------------


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
    broken = np.array([1.0, NAN], dtype=np.float32)
    sick = write_model(root / "sick", **{"model.norm.weight": broken})
    empty = root / "empty"
    empty.mkdir()
    return {
        "pickle": (pickled, "pytorch_model.bin"),
        "remote code": (coded, "auto_map"),
        "architecture": (strange, "MambaForCausalLM"),
        "missing shard": (sharded, "model-00002-of-00002.safetensors"),
        "NaN": (sick, "model.norm.weight"),
        "no files": (empty, "config.json"),
    }


@pytest.mark.parametrize(
    "kind",
    ["pickle", "remote code", "architecture", "missing shard", "NaN", "no files"],
)
def test_a_bad_model_folder_is_refused_by_file(
    client: TestClient, refused: Refused, data_dir: Path, kind: str
) -> None:
    folder, named = broken_models(data_dir / "models" / "broken")[kind]
    code = "non_finite" if kind == "NaN" else "model_load_failed"
    answer = post(client, {**BODY, "model": {"path": str(folder)}})
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
        answer = post(client, {**BODY, "model": "short", **change})
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
        answer = post(client, {**BODY, "model": {"path": str(path)}})
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
        answer = post(client, {**BODY, "model": "my-model"})
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


# -- datasets ------------------------------------------------------------------

LINES = b'{"text": "one"}\n{"text": "two"}\n'
JSONL = {"Content-Type": "application/jsonl"}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "0 of 0"),
        (b"\n\n", "0 of 0"),
        (b'{"text": "  "}\n', "0 of 1"),
        (b'{"text": "one"}\n{"txt": "two"}\n', "line 2"),
        (b"\xff\n", "line 1"),
        (b'{"text": "one"}\nnonsense\n', "line 2"),
    ],
)
def test_an_empty_or_broken_dataset_is_refused(
    client: TestClient, refused: Refused, data_dir: Path, content: bytes, named: str
) -> None:
    answer = client.put("/v1/datasets/mine", content=content, headers=JSONL)
    problem = refused(answer, 422, "calibration_data_empty")
    assert named in problem["detail"]
    assert client.get("/v1/datasets").json()["data"][-1]["built_in"]
    assert list((data_dir / "datasets").glob(".*")) == []


def test_a_dataset_of_a_bad_name_type_or_size_is_refused(
    client: TestClient,
    refused: Refused,
    key: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = client.put("/v1/datasets/.x", content=LINES, headers=JSONL)
    refused(answer, 422, "validation_error")
    answer = client.put("/v1/datasets/web_text", content=LINES, headers=JSONL)
    refused(answer, 409, "name_taken")
    answer = client.put("/v1/datasets/mine", json={"text": "one"})
    refused(answer, 415, "unsupported_media_type")
    monkeypatch.setenv("PRECISION_MAX_DATASET_BYTES", "1024")
    settings.settings.cache_clear()
    with TestClient(create_app(), headers={"Authorization": f"Bearer {key}"}) as small:
        url = "/v1/datasets/mine"
        answer = small.put(url, content=LINES * 100, headers=JSONL)
        refused(answer, 413, "body_too_large")
        answer = small.put(url, content=iter([LINES] * 100), headers=JSONL)
        refused(answer, 413, "body_too_large")


@pytest.mark.parametrize("name", ["", "a b", "../x", ".x", "x" * 64, "é"])
def test_a_bad_name_of_a_model_is_refused(
    client: TestClient, refused: Refused, tiny: Path, name: str
) -> None:
    answer = client.post("/v1/models", json={"name": name, "path": str(tiny)})
    refused(answer, 422, "validation_error", "/name")
