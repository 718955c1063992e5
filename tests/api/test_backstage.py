"""The catalog for Backstage, and the examples of deploy/portal: read as portals do."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient
from jsonschema import Draft7Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT7

from api import webhook_docs
from api.settings import Settings, settings
from tests.api.conftest import Json

ROOT = Path(__file__).parents[2]
PORTAL = ROOT / "deploy" / "portal"
# Of npm's @backstage/catalog-model 1.10.3; the file says whose it is.
SCHEMAS = json.loads((ROOT / "tests/ui/backstage.schema.json").read_text())["schemas"]
KINDS = {
    "Component": "ComponentV1alpha1",
    "API": "ApiV1alpha1",
    "Resource": "ResourceV1alpha1",
}


def validator(kind: str) -> Draft7Validator:
    resources = [
        (schema["$id"], Resource.from_contents(schema, DRAFT7)) for schema in SCHEMAS
    ]
    registry: Registry[Any] = Registry().with_resources(resources)
    wanted = next(s for s in SCHEMAS if s["$id"].lower() == KINDS[kind].lower())
    return Draft7Validator(wanted, registry=registry)


def entities(client: TestClient) -> list[Json]:
    answer = client.get("/catalog-info.yaml", headers={"Authorization": ""})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("application/yaml")
    return list(yaml.safe_load_all(answer.text))


def test_backstage_takes_every_entity(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRECISION_HARDWARE_QUEUES", "h100,l4")
    monkeypatch.setenv("PRECISION_CATALOG_SYSTEM", "system:default/serving")
    monkeypatch.setenv("PRECISION_PUBLIC_URL", "https://precision.example.com")
    settings.cache_clear()
    found = entities(client)
    kinds = [(one["kind"], one["metadata"]["name"]) for one in found]
    assert kinds == [
        ("Component", "precision"),
        ("API", "precision"),
        ("Resource", "precision-h100"),
        ("Resource", "precision-l4"),
    ]
    for one in found:
        assert list(validator(one["kind"]).iter_errors(one)) == []
        # Its code asks for more than its schema: names and tags have an alphabet.
        assert re.fullmatch(r"[a-zA-Z0-9._-]{1,63}", one["metadata"]["name"])
        for tag in one["metadata"].get("tags", ()):
            assert re.fullmatch(r"[a-z0-9+#-]{1,63}", tag)
    assert found[0]["spec"]["dependsOn"] == [
        "resource:precision-h100",
        "resource:precision-l4",
    ]
    assert all(one["spec"]["system"] == "system:default/serving" for one in found)


def test_the_validator_can_refuse(client: TestClient) -> None:
    component, api = entities(client)
    del component["metadata"]["name"]
    assert list(validator("Component").iter_errors(component))
    api["spec"]["definition"] = {"$text": "./openapi.json"}  # before it is read
    assert list(validator("API").iter_errors(api))


def test_the_definition_is_the_description_that_is_served(client: TestClient) -> None:
    _, api = entities(client)
    definition = json.loads(api["spec"]["definition"])
    assert definition == client.get("/openapi.json").json()


def test_links_lead_to_pages_that_there_are(client: TestClient) -> None:
    for one in entities(client):
        for link in one["metadata"]["links"]:
            path = link["url"].removeprefix("http://testserver")
            assert client.get(path).status_code == 200, link


def test_an_owner_that_is_no_entity_stops_the_start(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner in (
        "",
        "group:default/",
        'x"\n  evil: true',
        "group:default/ml platform",
    ):
        monkeypatch.setenv("PRECISION_CATALOG_OWNER", owner)
        with pytest.raises(ValueError, match="catalog_owner"):
            Settings()


def test_the_copy_in_the_repository_is_valid_once_its_text_is_read() -> None:
    for one in yaml.safe_load_all((PORTAL / "catalog-info.yaml").read_text()):
        if "definition" in one["spec"]:
            assert one["spec"]["definition"]["$text"].endswith("/openapi.json")
            one["spec"]["definition"] = "{}"  # what Backstage puts there
        assert list(validator(one["kind"]).iter_errors(one)) == []


def test_backstages_proxy_lets_our_headers_through() -> None:
    config = yaml.safe_load((PORTAL / "backstage-app-config.yaml").read_text())
    endpoint = config["proxy"]["endpoints"]["/precision"]
    needed = {
        "Authorization",
        "ETag",
        "Idempotency-Key",
        "If-None-Match",
        "Last-Event-ID",
        "Location",
        "Range",
        "RateLimit",
        "Retry-After",
    }
    assert needed <= set(endpoint["allowedHeaders"])
    host = endpoint["target"].removeprefix("https://")
    assert {"host": host} in config["backend"]["reading"]["allow"]


def filled(template: Any, values: Json) -> Any:
    """Fill a template as Port does: what is all of a string keeps its type."""
    if isinstance(template, dict):
        return {key: filled(value, values) for key, value in template.items()}
    whole = re.fullmatch(r"\{\{ (\S+) \}\}", template)
    if whole:
        return values[whole[1]]
    return re.sub(r"\{\{ (\S+) \}\}", lambda m: str(values[m[1]]), template)


def test_the_service_takes_what_ports_action_sends(
    tiny: Path, client: TestClient, key: str
) -> None:
    action = json.loads((PORTAL / "port-action.json").read_text())
    method = action["invocationMethod"]
    values = {
        ".secrets.PRECISION_KEY": key,
        ".run.id": "r_1",
        ".entity.identifier": "component:default/ads",
        ".inputs.model": "tiny",
        ".inputs.hardware": "h100",
        ".inputs.latency_sla": 0.02,
        ".inputs.data_distribution": "web_text",
    }
    headers, body = filled(method["headers"], values), filled(method["body"], values)
    path = method["url"].removeprefix("https://precision.example.com")
    first = client.post(path, headers=headers, json=body)
    assert first.status_code == 202, first.text
    again = client.post(path, headers=headers, json=body)
    assert again.json()["id"] == first.json()["id"]
    listed = client.get("/v1/jobs?metadata[entity_ref]=component:default/ads").json()
    assert [job["id"] for job in listed["data"]] == [first.json()["id"]]


def test_ports_mapping_reads_fields_that_our_webhooks_have() -> None:
    mapping = (PORTAL / "port-webhook.json").read_text()
    known = set(webhook_docs.JobNews.model_fields)
    assert set(re.findall(r"\.body\.data\.(\w+)", mapping)) <= known
