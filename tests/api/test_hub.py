"""Which models of a hub a request may name, where the operator allows any."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from api import settings
from tests.api.conftest import Refused
from tests.service import BODY

COMMIT = "0123456789abcdef0123456789abcdef01234567"
URI = f"hf://acme/tiny@{COMMIT}"


@pytest.fixture
def hub(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECISION_HUB_MODELS", "acme/*, other/one")
    settings.settings.cache_clear()


def request(model: object) -> dict[str, Any]:
    return {**BODY, "model": model}


@pytest.mark.parametrize(
    "uri",
    [
        "hf://acme/tiny",
        "hf://acme/tiny@main",
        f"hf://acme/tiny@{COMMIT[:-1]}",
        f"hf://acme/tiny@{COMMIT.upper()}",
        f"hf://../tiny@{COMMIT}",
        f"hf://acme/../../tiny@{COMMIT}",
        f"hf://acme/ti\nny@{COMMIT}",
        f"https://127.0.0.1/acme/tiny@{COMMIT}",
    ],
)
def test_what_is_no_commit_is_refused(
    hub: None, client: TestClient, refused: Refused, uri: str
) -> None:
    answered = client.post("/v1/optimize", json=request(uri))
    problem = refused(answered, 422, "validation_error", "/model")
    assert problem["errors"][0]["code"] == "model_uri_invalid"


def test_a_repository_that_is_not_allowed_is_refused(
    hub: None, client: TestClient, refused: Refused
) -> None:
    other = f"hf://other/two@{COMMIT}"
    answered = client.post("/v1/optimize", json=request(other))
    problem = refused(answered, 422, "model_uri_not_allowed", "/model")
    assert problem["errors"][0]["known"] == ["acme/*", "other/one"]


def test_one_way_to_name_a_model_is_enough(
    hub: None, client: TestClient, refused: Refused
) -> None:
    both = {"uri": URI, "id": "tiny"}
    answered = client.post("/v1/optimize", json=request(both))
    refused(answered, 422, "validation_error", "/model")


def test_a_stack_is_for_a_model_that_is_here(
    hub: None, client: TestClient, refused: Refused
) -> None:
    stack = {"schema": "precision.stack/1", "stack": {"lm_head": "bf16"}}
    answered = client.post("/v1/optimize", json={**request(URI), "stack": stack})
    assert answered.status_code == 422
    assert answered.json()["errors"][0]["pointer"].startswith("/stack")


def test_an_estimate_is_of_a_model_that_is_here(
    hub: None, client: TestClient, refused: Refused
) -> None:
    answered = client.post("/v1/estimate", json={"model": URI, "hardware": "h100"})
    refused(answered, 422, "unknown_model", "/model")


@pytest.mark.parametrize("patterns", ["acme", "https://hub/acme/x", "a/b/c"])
def test_a_pattern_that_names_no_repository_is_refused(
    data_dir: object, monkeypatch: pytest.MonkeyPatch, patterns: str
) -> None:
    monkeypatch.setenv("PRECISION_HUB_MODELS", patterns)
    settings.settings.cache_clear()
    with pytest.raises(ValueError, match="hub_models"):
        settings.settings()
