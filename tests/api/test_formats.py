"""Formats over HTTP, and any number in any of them."""

import math

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings, strategies as st

from optimizer.formats import FORMATS, KNOWN
from tests.api.conftest import Refused


def test_formats_say_which_may_be_asked_for(client: TestClient) -> None:
    listed = client.get("/v1/formats").json()["data"]
    assert [f["id"] for f in listed] == list(KNOWN)
    searchable = {f["id"] for f in listed if f["searchable"]}
    usual = {"fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"}
    assert searchable == usual | {"fp6_e3m2", "fp4_e2m1", "int8", "int4"}  # on request
    for row in listed:
        assert client.get(row["links"]["self"]).json() == row
        assert client.get(row["links"]["inspect"]).json()["format"] == row["id"]


def test_a_format_has_its_constants(client: TestClient) -> None:
    e4m3 = client.get("/v1/formats/fp8_e4m3").json()
    assert (e4m3["bits"], e4m3["max"], e4m3["bias"]) == (8, 448.0, 7)
    assert (e4m3["smallest_normal"], e4m3["smallest_subnormal"]) == (2**-6, 2**-9)
    assert (e4m3["has_inf"], e4m3["has_nan"]) == (False, True)
    int8 = client.get("/v1/formats/int8").json()
    assert (int8["integer"], int8["smallest_normal"], int8["eps"]) == (True, None, None)
    assert (int8["max"], int8["has_nan"]) == (127.0, False)
    e8m0 = client.get("/v1/formats/e8m0").json()
    assert (e8m0["bits"], e8m0["signed"], e8m0["searchable"]) == (8, False, False)
    assert (e8m0["smallest_normal"], e8m0["max"]) == (2**-127, 2.0**127)


def test_a_number_is_looked_at(client: TestClient) -> None:
    found = client.get("/v1/formats/bf16/inspect", params={"value": "0.1"}).json()
    assert found["code"] == "0x3DCD"
    assert found["bits"] == {
        "sign": "0",
        "exponent": "01111011",
        "fraction": "1001101",
    }
    assert (found["stored"], found["ulp"]) == (0.10009765625, 2**-11)
    assert (found["below"], found["above"]) == (0.099609375, 0.1005859375)
    assert found["binades_to_overflow"] == pytest.approx(
        math.log2(FORMATS["bf16"].max / 0.1)
    )


@pytest.mark.parametrize(
    ("value", "kind"), [("inf", "infinite"), ("nan", "nan"), ("-0", "zero")]
)
def test_what_is_not_finite_is_null_in_json(
    client: TestClient, value: str, kind: str
) -> None:
    found = client.get("/v1/formats/fp16/inspect", params={"value": value}).json()
    assert found["kind"] == kind
    assert (found["stored"] is None) == (value != "-0")


@pytest.mark.parametrize("path", ["bf61", "bf61/inspect?value=1"])
def test_an_unknown_format_is_not_found(
    client: TestClient, refused: Refused, path: str
) -> None:
    problem = refused(client.get(f"/v1/formats/{path}"), 404, "not_found")
    assert "did you mean bf16 or fp16?" in problem["detail"]
    assert "fp4_e2m1" in problem["detail"]


@pytest.mark.parametrize(
    ("name", "query", "said"),
    [
        ("bf16", "?value=0x39", "is not a decimal number"),
        ("bf16", "?value=1e9999", "beyond 1e±300"),
        ("bf16", "?value=" + "9" * 65, "at most 64 characters"),
        ("bf16", "?value=", "at least 1 character"),
        ("bf16", "", "required"),
        ("int4", "?value=nan", "int4 has no code for NaN"),
        ("e8m0", "?value=0", "e8m0 has no code for zero or for a negative number"),
    ],
)
def test_a_value_that_is_none_is_named(
    client: TestClient, refused: Refused, name: str, query: str, said: str
) -> None:
    answer = client.get(f"/v1/formats/{name}/inspect{query}")
    problem = refused(answer, 422, "validation_error")
    (error,) = problem["errors"]
    assert error["parameter"] == "value"
    assert said in error["detail"]


@given(value=st.text(min_size=1))
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_no_text_makes_the_service_fail(client: TestClient, value: str) -> None:
    answer = client.get("/v1/formats/fp8_e5m2/inspect", params={"value": value})
    assert answer.status_code in (200, 422)


def test_formats_want_a_key(client: TestClient, refused: Refused) -> None:
    for path in ("/v1/formats", "/v1/formats/bf16", "/v1/formats/bf16/inspect?value=1"):
        answer = client.get(path, headers={"Authorization": ""})
        refused(answer, 401, "unauthenticated")
