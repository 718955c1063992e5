"""Anything at all may come in; no answer is a failure of the service."""

import json
from typing import Any

import hypothesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, strategies as st

from api.estimate import EstimateRequest
from api.schemas import OptimizeRequest
from tests.api.conftest import BODY, Refused, jobs_in_database

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
THOROUGH = hypothesis.settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
FIELDS = st.sampled_from(sorted(OptimizeRequest.model_fields))
ESTIMATED = st.sampled_from(sorted(EstimateRequest.model_fields))


@given(changes=st.dictionaries(FIELDS, JSON, min_size=1, max_size=3))
@THOROUGH
def test_no_body_makes_the_service_fail(
    client: TestClient, refused: Refused, changes: dict[str, Any]
) -> None:
    body = {**BODY, "task": "none such", **changes}  # so that no job is made
    content = json.dumps({**body, "hardware": changes.get("hardware", "none such")})
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/optimize", content=content, headers=headers)
    refused(answer, answer.status_code, answer.json()["code"])
    assert answer.status_code in (400, 422)


@given(changes=st.dictionaries(ESTIMATED, JSON, min_size=1, max_size=3))
@THOROUGH
def test_no_body_makes_an_estimate_fail(
    client: TestClient, refused: Refused, changes: dict[str, Any]
) -> None:
    body = {"model": "gpt2", "hardware": "t4", **changes}
    content = json.dumps(body)
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/estimate", content=content, headers=headers)
    if answer.status_code == 200:
        json.dumps(answer.json(), allow_nan=False)
    else:
        refused(answer, answer.status_code, answer.json()["code"])
        assert answer.status_code in (400, 422)


@given(content=st.binary(max_size=200))
@THOROUGH
def test_no_bytes_make_the_service_fail(
    client: TestClient, refused: Refused, content: bytes
) -> None:
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/optimize", content=content, headers=headers)
    refused(answer, answer.status_code, answer.json()["code"])
    assert answer.status_code in (400, 422)
    upload = {"Content-Type": "application/jsonl"}
    answer = client.put("/v1/datasets/x", content=content, headers=upload)
    assert answer.status_code == 422
    assert jobs_in_database() == 0
