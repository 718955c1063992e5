"""The description is valid, whole, and the one that is checked in."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from fastapi import FastAPI
from fastapi.testclient import TestClient
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from api import openapi, scopes
from api.app import create_app
from api.webhook_bodies import DISABLED, TEST, JobEvent

METHODS = {"get", "put", "post", "patch", "delete"}


@pytest.fixture
def app(data_dir: object) -> FastAPI:
    return create_app()


@pytest.fixture
def operations(app: FastAPI) -> list[dict[str, Any]]:
    paths = openapi.describe(app)["paths"]
    return [operation for path in paths.values() for operation in path.values()]


def test_the_file_is_what_the_service_serves(app: FastAPI) -> None:
    message = "`python -m api.openapi` writes it down"
    assert openapi.FILE.read_text("utf-8") == openapi.text(app), message


def test_yaml_says_the_same_in_the_same_order(app: FastAPI) -> None:
    with TestClient(app) as client:
        answer = client.get("/openapi.yaml")
        assert client.head("/openapi.yaml").status_code == 200
    assert answer.headers["content-type"] == "application/yaml"
    read = yaml.safe_load(answer.text)
    assert read == openapi.describe(app)
    assert list(read["paths"]) == list(openapi.describe(app)["paths"])


def test_it_is_openapi_3_1(app: FastAPI) -> None:
    described = openapi.describe(app)
    assert described["openapi"].startswith("3.1.")
    validate(described)


def test_every_operation_has_an_id_of_its_own_and_words(
    app: FastAPI, operations: list[dict[str, Any]]
) -> None:
    ids = Counter(operation["operationId"] for operation in operations)
    assert [name for name, count in ids.items() if count > 1] == []
    assert all(re.fullmatch("[a-z]+(_[a-z]+)*", name) for name in ids)
    assert set(scopes.NEEDED) <= set(ids)
    tags = {tag["name"] for tag in openapi.describe(app)["tags"]}
    for operation in operations:
        assert operation["description"], operation["operationId"]
        assert set(operation["tags"]) <= tags, operation["operationId"]
    for path in openapi.describe(app)["paths"].values():
        assert set(path) <= METHODS


def test_every_error_is_described_as_a_problem(
    operations: list[dict[str, Any]],
) -> None:
    for operation in operations:
        content = operation["responses"]["default"]["content"]
        assert list(content) == ["application/problem+json"]
        for status in operation["responses"]:
            assert status != "422"  # FastAPI's own form of it


def examples(
    operations: list[dict[str, Any]],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every JSON body that is described, and a good answer, as it was shown."""
    for operation in operations:
        name = operation["operationId"]
        sent = operation.get("requestBody", {}).get("content", {})
        body = sent.get("application/json")
        if body and body["schema"].get("type") != "string":  # a file
            yield name, body
        good = [a for s, a in operation["responses"].items() if s < "3"]
        answers = [a.get("content", {}).get("application/json") for a in good]
        if said := [answer for answer in answers if answer]:
            yield name, next((a for a in said if "example" in a), said[0])


def test_every_body_has_an_example_that_is_one(
    app: FastAPI, operations: list[dict[str, Any]]
) -> None:
    components = openapi.describe(app)["components"]
    seen = 0
    for name, body in examples(operations):
        assert "example" in body, f"{name}: `python -m tests.api.examples` makes one"
        schema = {**body["schema"], "components": components}
        found = list(Draft202012Validator(schema).iter_errors(body["example"]))
        assert found == [], name
        seen += 1
    assert seen >= 60
    told = openapi.EXAMPLES.read_text("utf-8")
    assert not re.search(r"po_live_\w|whsec_\w|/tmp/", told)


def test_every_webhook_is_described(app: FastAPI) -> None:
    described = openapi.describe(app)["webhooks"]
    assert set(described) == {*JobEvent, TEST, DISABLED}
