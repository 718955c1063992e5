"""The description is valid, whole, and the one that is checked in."""

import re
from collections import Counter
from typing import Any

import pytest
from fastapi import FastAPI
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


def test_every_webhook_is_described(app: FastAPI) -> None:
    described = openapi.describe(app)["webhooks"]
    assert set(described) == {*JobEvent, TEST, DISABLED}
