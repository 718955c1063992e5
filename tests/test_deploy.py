"""What `deploy/` promises: files that their own readers accept, about what there is."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
import yaml
from fastapi.testclient import TestClient

from api.settings import Settings

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
RULES = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana/precision.json").read_text())
RUN_BOOK = (DEPLOY / "README.md").read_text("utf-8")
OURS = ("kubernetes", "prometheus", "grafana")
KEDA = {"ScaledObject", "TriggerAuthentication"}  # not Kubernetes' own
SETTINGS = {f"PRECISION_{name.upper()}" for name in Settings.model_fields}


def rules() -> list[dict[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"]]


def queries() -> list[str]:
    panels = [target["expr"] for p in DASHBOARD["panels"] for target in p["targets"]]
    return [rule["expr"] for rule in rules()] + panels


def manifests() -> Iterator[dict[str, Any]]:
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        yield from yaml.safe_load_all(path.read_text())


def named(kind: str, name: str) -> dict[str, Any]:
    found = [m for m in manifests() if m["kind"] == kind]
    return next(m for m in found if m["metadata"].get("name") == name)


@pytest.mark.parametrize("query", queries())
def test_every_query_is_promql(query: str) -> None:
    promql_parser.parse(query)


def test_every_query_is_of_what_is_exported(client: TestClient) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    client.get("/v1/models")  # so that requests have been counted
    exposed = re.findall(r"^(precision_\w+)", client.get("/metrics").text, re.M)
    described = re.findall(r"^# TYPE (\w+)", client.get("/metrics").text, re.M)
    for query in queries():
        for name in re.findall(r"\bprecision[_:][\w:]+", query):
            known = {*exposed, *described, *recorded}
            family = name.removesuffix("_total")  # no sample: the type is there alone
            assert name in known or family in described, name


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_promtool_accepts_and_the_rules_ring_when_they_should() -> None:
    for what in (["check", "rules", "rules.yml"], ["test", "rules", "tests.yml"]):
        command = ["promtool", *what[:-1], str(DEPLOY / "prometheus" / what[-1])]
        subprocess.run(command, check=True, capture_output=True)


def test_every_alert_has_a_place_in_the_run_book() -> None:
    titles = re.findall(r"^#+ (.+)$", RUN_BOOK, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}
    for rule in rules():
        if "alert" in rule:
            page, anchor = rule["annotations"]["runbook"].split("#")
            assert (page, anchor in anchors) == ("README.md", True), rule["alert"]
            assert rule["labels"]["severity"] in {"page", "ticket"}


@pytest.mark.parametrize("file", sorted((DEPLOY / "grafana").glob("*.json")))
def test_panels_do_not_overlap_and_have_their_own_ids(file: Path) -> None:
    panels = json.loads(file.read_text())["panels"]
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        columns = range(at["x"], at["x"] + at["w"])
        mine = {(x, y) for x in columns for y in range(at["y"], at["y"] + at["h"])}
        assert not mine & cells, panel["title"]
        assert max(columns) < 24
        cells |= mine
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("manifest", list(manifests()), ids=lambda m: m["kind"])
def test_kubernetes_accepts_it(manifest: dict[str, Any]) -> None:
    if manifest["kind"] not in KEDA:
        kubernetes_validate.validate(manifest, "1.31", strict=True)


def test_what_is_scaled_selected_and_mounted_is_there() -> None:
    deployments = {
        m["metadata"]["name"] for m in manifests() if m["kind"] == "Deployment"
    }
    for manifest in manifests():
        if (
            target := manifest["spec"].get("scaleTargetRef")
            if "spec" in manifest
            else None
        ):
            assert target["name"] in deployments
    for name in deployments:
        pod = named("Deployment", name)["spec"]["template"]["spec"]
        for container in pod["containers"]:
            volumes = {volume["name"] for volume in pod["volumes"]}
            assert {m["name"] for m in container["volumeMounts"]} <= volumes
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True


def test_workers_are_counted_by_rows_of_states_that_there_are() -> None:
    from api.models import FINAL, Status

    trigger = named("ScaledObject", "precision-worker-h100")["spec"]["triggers"][0]
    query = trigger["metadata"]["query"]
    assert trigger["type"] == "postgresql"
    states = set(re.findall(r"'(\w+)'", query)) - {"h100"}
    assert states == {status.value for status in Status if status not in FINAL}


# Of compose.yaml alone: where the machine's weights lie, and its port.
OF_COMPOSE = {"PRECISION_WEIGHTS", "PRECISION_PORT"}


@pytest.mark.parametrize(
    "path",
    sorted(p for p in DEPLOY.rglob("*") if p.suffix in (".yaml", ".Dockerfile")),
    ids=lambda path: str(path.relative_to(DEPLOY)),
)
def test_settings_that_are_named_exist(path: Path) -> None:
    named_there = set(re.findall(r"PRECISION_[A-Z_]*[A-Z]", path.read_text("utf-8")))
    assert named_there <= SETTINGS | OF_COMPOSE, named_there - SETTINGS


def test_workers_are_probed_by_the_file_that_they_touch() -> None:
    worker = named("Deployment", "precision-worker-h100")["spec"]["template"]["spec"]
    (container,) = worker["containers"]
    (file,) = [
        e["value"] for e in container["env"] if e["name"] == "PRECISION_HEARTBEAT_FILE"
    ]
    assert file in container["livenessProbe"]["exec"]["command"][-1]
    image = (DEPLOY / "worker.Dockerfile").read_text()
    assert image.count(file) == 2  # the setting, and the health check


def test_compose_waits_for_what_it_needs() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name, service in services.items():
        for other, how in service.get("depends_on", {}).items():
            assert other in services
            if how["condition"] == "service_healthy":
                assert "healthcheck" in services[other], (name, other)
        build = service.get("build")
        if build:
            assert (ROOT / build["dockerfile"]).is_file()
    assert set(services) >= {"database", "broker", "migrate", "api", "worker"}


@pytest.mark.parametrize("name", ["api.Dockerfile", "worker.Dockerfile"])
def test_images_copy_what_there_is_and_run_as_somebody(name: str) -> None:
    lines = (DEPLOY / name).read_text().replace("\\\n", " ").splitlines()
    instructions = [line.split(maxsplit=1) for line in lines if line and line[0] != "#"]
    for instruction, rest in instructions:
        if instruction == "COPY" and "--from" not in rest:
            assert all((ROOT / source).exists() for source in rest.split()[:-1])
    kinds = [instruction for instruction, _ in instructions]
    assert kinds[-1] == "CMD"
    assert {"USER", "HEALTHCHECK"} <= set(kinds)
    assert "PRECISION_SECRET" not in "".join(lines)
