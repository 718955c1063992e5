"""What no path, no query and no name may be, for every route of the description."""

import re
import string
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from fastapi.testclient import TestClient

from tests.api import tenancy
from tests.api.conftest import Json, Refused
from tests.api.tenancy import Call

NO_IDS = (
    "0",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e",
    "a%00b",
    quote("'; DROP TABLE jobs; --"),
    quote("ジョブ"),
    quote("\u202ejob"),
    "%ff%fe",
    "job_" + "z" * 26,
    "x" * 3000,
)
NO_NAMES = (
    "",
    " ",
    "a b",
    "a/b",
    "../a",
    "a\x00b",
    "a\x1b[31m",
    "a\n",
    "a\u202eb",
    "naïve",
    "モデル",
    "😀",
    "-a",
    ".a",
    "x" * 64,
)


def described(client: TestClient) -> Iterator[tuple[str, str, Json]]:
    for path, operations in client.get("/openapi.json").json()["paths"].items():
        for method, operation in operations.items():
            yield path, method.upper(), operation


def calls(client: TestClient, value: str) -> list[Call]:
    """Return a call of every route with an id, with `value` for each parameter."""
    found = []
    for path, method, operation in described(client):
        if "{" in path:
            url = re.sub(r"\{number\}", "1", path)
            url = re.sub(r"\{\w+\}", value, url)
            name = operation["operationId"]
            found.append(Call(method, url, name, tenancy.request_of(operation)))
    return found


@pytest.mark.parametrize("value", NO_IDS)
def test_what_is_no_id_is_not_found_by_any_route(
    client: TestClient, refused: Refused, value: str
) -> None:
    asked = calls(client, value)
    assert len(asked) > 30
    for call in asked:
        answer = client.request(call.method, call.path, **call.request)
        if call.operation == "put_dataset" and answer.status_code == 404:
            continue  # a path of its own, by now
        assert 400 <= answer.status_code < 500, (call, answer.text)
        refused(answer, answer.status_code, answer.json()["code"])
        assert answer.status_code in (404, 405, 415, 422), (call, answer.text)


def test_no_id_ends_a_header(client: TestClient) -> None:
    for path in ("/v1/jobs/{}", "/v1/models/{}", "/v1/jobs/x/artifacts/{}"):
        answer = client.get(path.format(quote("a\r\nX-Evil: 1")))
        assert answer.status_code == 404
        assert "x-evil" not in answer.headers


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "1e1", "ten", "", "9" * 40])
def test_a_page_has_a_size(client: TestClient, refused: Refused, limit: str) -> None:
    lists = [
        path
        for path, method, operation in described(client)
        if method == "GET"
        and "limit" in [p["name"] for p in operation.get("parameters", [])]
    ]
    assert {"/v1/jobs", "/v1/jobs/{job_id}/trials", "/v1/audit_events"} <= set(lists)
    for path in lists:
        url = re.sub(r"\{\w+\}", "job_none", path)
        problem = refused(
            client.get(url, params={"limit": limit}), 422, "validation_error"
        )
        assert problem["errors"][0]["parameter"] == "limit", path


def test_a_cursor_of_ours_is_signed(client: TestClient, refused: Refused) -> None:
    for number in range(2):
        client.post("/v1/api_keys", json={"name": f"n{number}", "scopes": ["jobs:*"]})
    page = client.get("/v1/api_keys", params={"limit": 1}).json()
    good = page["next_cursor"]
    assert client.get("/v1/api_keys", params={"after": good}).status_code == 200
    alphabet = string.ascii_letters + string.digits + "-_"
    other = "A" if good[4] != "A" else "B"
    tampered = [good[:-1] + last for last in alphabet if last != good[-1]]
    tampered += [good[1:], good + "AAAA", good.swapcase(), "AAAA"]
    tampered += ["=", "é", "' OR 1=1", good.replace(good[4], other, 1)]
    lists = [
        path
        for path, method, operation in described(client)
        if method == "GET"
        and "{" not in path
        and "after" in [p["name"] for p in operation.get("parameters", [])]
    ]
    assert len(lists) >= 5
    for path in lists:
        for cursor in tampered:
            answer = client.get(path, params={"after": cursor})
            refused(answer, 400, "bad_cursor")


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_name_is_plain(client: TestClient, refused: Refused, name: str) -> None:
    for path, body in (
        ("/v1/datasets", {"bytes": 100}),
        ("/v1/models", {"path": "/nowhere"}),
    ):
        answer = client.post(path, json={"name": name, **body})
        code = "malformed_json" if "\x00" in name else "validation_error"
        refused(answer, 400 if "\x00" in name else 422, code)
        assert not re.search(r"[\x00-\x08\x0b\x1b]", answer.text)


@pytest.mark.parametrize(
    "label", ["", "a\x00b", "a\x1b[0m", "a\nb", "a\x7f", "x" * 129]
)
def test_a_label_has_no_control_characters(
    client: TestClient, refused: Refused, label: str
) -> None:
    answer = client.post("/v1/api_keys", json={"name": label, "scopes": ["jobs:*"]})
    assert answer.status_code in (400, 422)
    refused(answer, answer.status_code, answer.json()["code"])


def test_a_label_may_be_in_any_script(client: TestClient) -> None:
    body = {"name": "検索チーム – größer 😀", "scopes": ["jobs:read"]}
    made = client.post("/v1/api_keys", json=body)
    assert made.json()["name"] == body["name"]


@pytest.mark.parametrize(
    "moment",
    [
        "0000-01-01T00:00:00Z",
        "10000-01-01T00:00:00Z",
        "9999-12-31T23:59:59-23:59",
        "0001-01-01T00:00:00+23:59",
        "2026-02-30T00:00:00Z",
        "2026-01-01",
        "2026-01-01T00:00:00",
        "1e300",
        "0.5",
        "now",
        "",
    ],
)
def test_a_moment_that_never_was_is_refused(
    client: TestClient, refused: Refused, moment: str
) -> None:
    for path, parameter in (
        ("/v1/jobs", "created_after"),
        ("/v1/jobs", "created_before"),
        ("/v1/usage", "since"),
        ("/v1/usage", "until"),
    ):
        answer = client.get(path, params={parameter: moment})
        problem = refused(answer, 422, "validation_error")
        assert problem["errors"][0]["parameter"] == parameter


@pytest.mark.parametrize("opening", [b'{"a":', b"["])
def test_ten_thousand_levels_are_too_many(
    client: TestClient, refused: Refused, opening: bytes
) -> None:
    closing = b"}" if opening.startswith(b"{") else b"]"
    body = opening * 10_000 + b"1" + closing * 10_000
    headers = {"Content-Type": "application/json"}
    for path in ("/v1/optimize", "/v1/estimate", "/v1/models", "/v1/api_keys"):
        answer = client.post(path, content=body, headers=headers)
        refused(answer, 400, "malformed_json")
