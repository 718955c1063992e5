"""What is not a request is refused by name, leaves no row, and stops nothing."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api import settings
from api.schemas import MAX_SLA_S
from tests.api.conftest import BODY, Refused
from tests.service import eventually

pytestmark = pytest.mark.usefixtures("nothing_is_queued")
NAN = float("nan")
INF = float("inf")


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


@pytest.mark.parametrize(
    "model",
    [
        f"hf://org/repo@{'a' * 40}",
        {"uri": f"hf://org/repo@{'a' * 40}"},
        {"id": "a", "uri": "s3://b"},
        {"id": "https://169.254.169.254/latest"},
    ],
)
def test_an_address_is_no_model(
    client: TestClient, refused: Refused, model: object
) -> None:
    answer = post(client, {**BODY, "model": model})
    problem = refused(answer, 422, "validation_error", "/model")
    [error] = problem["errors"]
    assert error["code"] == "model_uri_not_allowed"
    assert "POST /v1/models" in error["detail"]


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
        (
            "/exports/1",
            "unknown_export",
            "compressed_tensors",
            {"exports": ["torchao", "gguf"]},
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
