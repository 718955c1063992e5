"""What every endpoint does alike: methods, versions, names of parameters, strange ids."""

import pytest
from fastapi.testclient import TestClient

from api import versions
from tests.api.conftest import Refused


@pytest.mark.parametrize(
    "path", ["/v1/jobs", "/v1/hardware", "/v1/models", "/livez", "/openapi.json"]
)
def test_head_is_get_without_the_body(client: TestClient, path: str) -> None:
    got, head = client.get(path), client.head(path)
    assert head.status_code == got.status_code == 200
    assert head.headers["content-type"] == got.headers["content-type"]
    assert head.headers["content-length"] == got.headers["content-length"]


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/jobs", "GET, HEAD"),
        ("/v1/optimize", "POST"),
        ("/v1/models", "GET, HEAD, POST"),
    ],
)
def test_what_a_path_allows_is_told(
    client: TestClient, refused: Refused, path: str, methods: str
) -> None:
    answer = client.options(path)
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["allow"] == methods
    answer = client.patch(path)
    refused(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == methods
    refused(client.options("/v1/nowhere"), 404, "not_found")


def test_each_answer_names_the_version(client: TestClient, refused: Refused) -> None:
    assert client.get("/livez").headers["api-version"] == versions.CURRENT
    pinned = {"API-Version": versions.CURRENT}
    assert client.get("/v1/jobs", headers=pinned).status_code == 200
    answer = client.get("/v1/jobs", headers={"API-Version": "2019-01-01"})
    assert refused(answer, 400, "unknown_version")["known"] == [versions.CURRENT]
    assert client.get("/nowhere").headers["api-version"] == versions.CURRENT


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/hardware", "/v1/models"])
def test_an_unknown_parameter_is_refused_by_name(
    client: TestClient, refused: Refused, path: str
) -> None:
    problem = refused(
        client.get(path, params={"stauts": "failed"}), 422, "unknown_parameter"
    )
    (field,) = problem["errors"]
    assert field["parameter"] == "stauts"


def test_a_watcher_may_ask_with_parameters(client: TestClient) -> None:
    assert client.get("/livez?t=1").status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/jobs/{}", "/v1/jobs/{}/events", "/v1/hardware/{}"]
)
@pytest.mark.parametrize(
    "name", ["%00", "a%00b", "job_", "'", "%F0%9F%92%A9", "x" * 5000, "%ED%A0%80"]
)
def test_an_id_that_is_none_is_not_found(
    client: TestClient, refused: Refused, path: str, name: str
) -> None:
    answer = client.get(path.format(name))
    assert refused(answer, 404, answer.json()["code"])


def test_text_that_no_database_holds_is_refused(
    client: TestClient, refused: Refused
) -> None:
    answer = client.get("/v1/jobs?after=%00")
    problem = refused(answer, 422, "validation_error")
    assert problem["errors"][0]["parameter"] == "after"
