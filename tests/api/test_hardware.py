"""The devices over HTTP: ours, the operator's, and what each refuses."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api import db, jobs
from api.app import create_app
from api.settings import settings
from optimizer import hardware
from optimizer.errors import HardwareError
from optimizer.hardware import DEVICES
from tests.api import hooks
from tests.api.conftest import BODY, Refused, jobs_in_database

ADDED = {
    "id": "h800",
    "aliases": ["h800-sxm"],
    "device": "H800 SXM5",
    "compute_capability": "9.0",
    "peak_dense_tflops": {"bf16": 989.4, "fp8": 1978.9},
    "memory_gb": 80,
    "memory_bandwidth_gbs": 3350,
}


@pytest.fixture
def hardware_file(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Name an operator's file, before the service starts; ours alone afterwards."""
    path = data_dir / "hardware.json"
    path.write_text(json.dumps({"devices": [ADDED]}))
    monkeypatch.setenv("PRECISION_HARDWARE_FILE", str(path))
    settings.cache_clear()
    yield path
    hardware.use(None)


def matmul(
    client: TestClient, name: str, weight: str, scaling: str, own: str = ""
) -> dict[str, Any]:
    device = client.get(f"/v1/hardware/{name}").json()
    wanted = (own or weight, weight, scaling)
    (found,) = [
        m
        for m in device["matmuls"]
        if (m["input"], m["weight"], m["scaling"]) == wanted
    ]
    return dict(found)


def choice(
    client: TestClient, name: str, component: str, wanted: str
) -> dict[str, Any]:
    device = client.get(f"/v1/hardware/{name}").json()
    (found,) = [c for c in device["components"][component] if c["choice"] == wanted]
    return dict(found)


def test_hardware_is_the_catalogue(client: TestClient, refused: Refused) -> None:
    listed = client.get("/v1/hardware").json()["data"]
    assert [device["id"] for device in listed] == [*DEVICES, "local"]
    assert len({frozenset(device) for device in listed}) == 1  # one shape
    for device in listed:
        assert client.get(device["links"]["self"]).json().items() >= device.items()
    h100 = client.get("/v1/hardware/H100 SXM5").json()
    assert h100 == client.get("/v1/hardware/h100").json()
    assert h100["peak_flops"]["fp8"] == DEVICES["h100"].peak_flops["fp8"]
    assert h100["ridge_flop_per_byte"]["bf16"] == pytest.approx(295.3, abs=0.05)
    assert h100["units"]["count"] == 132
    assert "one_e5m2" in h100["shape_rules"]
    assert h100["stored_weights"] == ["fp8_e4m3", "int4"]
    assert h100["stored_cache"] == ["fp8_e4m3", "fp8_e5m2"]
    assert h100["sources"]


def test_a_device_says_how_many_jobs_wait_and_run(client: TestClient) -> None:
    tenant = hooks.tenant_named("other")
    first, _ = hooks.submitted(tenant), hooks.submitted(tenant)
    with db.transaction() as session:
        assert jobs.claim(session, first, "worker-1") is not None
    for device in client.get("/v1/hardware").json()["data"]:
        load = (device["status"], device["queue_depth"], device["running"])
        wanted = ("busy", 1, 1) if device["id"] == "h100" else ("idle", 0, 0)
        assert load == wanted, device["id"]
    assert client.get("/v1/hardware/h100").json()["queue_depth"] == 1
    assert client.get("/v1/hardware/local").json()["status"] == "idle"


def test_an_unknown_device_is_answered_with_the_closest(
    client: TestClient, refused: Refused
) -> None:
    problem = refused(client.get("/v1/hardware/h1000"), 404, "not_found")
    assert "did you mean h100 or v100 or p100?" in problem["detail"]
    problem = refused(client.get("/v1/hardware/tpu"), 404, "not_found")
    assert "known: p100" in problem["detail"]


@pytest.mark.parametrize("name", ["x" * 20_000, "%F0%9F%92%A9", "%20", "..%2Fh100"])
def test_no_name_makes_the_service_fail(
    client: TestClient, refused: Refused, name: str
) -> None:
    for kind in ("hardware", "formats"):
        problem = refused(client.get(f"/v1/{kind}/{name}"), 404, "not_found")
        assert len(problem["detail"]) < 1000


def test_what_local_can_do_is_not_known(client: TestClient) -> None:
    local = client.get("/v1/hardware/local").json()
    assert local["peak_flops"] == local["components"] == {}
    assert local["bandwidth_bytes_s"] is local["units"] is None
    assert "until a worker has measured it" in local["notes"][0]


# Case E3
@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("v100", "refused"),
        ("t4", "refused"),
        ("a100", "weight_only"),
        ("a10", "weight_only"),
        ("l4", "supported"),
        ("h100", "supported"),
        ("b200", "supported"),
        ("rtx-5090", "supported"),
    ],
)
def test_fp8_matmul_by_generation(client: TestClient, name: str, status: str) -> None:
    found = matmul(client, name, "fp8_e4m3", "tensor")
    assert found["status"] == status
    assert (found["reason"] is None) == (status == "supported")
    if status == "weight_only":
        assert "gain memory and bandwidth, no compute" in found["reason"]
        stored = choice(client, name, "ffn_in", "fp8_e4m3_weight_only")
        assert stored["status"] == "weight_only"
        assert "bf16 in arithmetic" in stored["reason"]


def test_blocks_of_128_on_ada_run_on_other_kernels(client: TestClient) -> None:
    assert matmul(client, "l4", "fp8_e4m3", "block")["status"] == "other_kernel"
    found = choice(client, "l4", "ffn_in", "fp8_e4m3_block")
    assert found["status"] == "other_kernel"
    assert "through Triton" in found["reason"]
    others = {"tensorrt_llm", "transformer_engine", "torchao"}
    assert set(found["engines"]) == others
    assert found["engines"]["transformer_engine"]["status"] == "refused"
    assert matmul(client, "h100", "fp8_e4m3", "block")["status"] == "supported"


def test_two_operands_in_e5m2_are_refused(client: TestClient) -> None:
    found = matmul(client, "h100", "fp8_e5m2", "tensor")
    assert found["status"] == "refused"
    assert "e5m2 for one operand at most" in found["reason"]
    one = matmul(client, "h100", "fp8_e4m3", "tensor", own="fp8_e5m2")
    assert one["status"] == "supported"


def test_engines_are_told_apart_where_they_differ(client: TestClient) -> None:
    e5m2 = choice(client, "h100", "ffn_in", "fp8_e5m2")
    assert (e5m2["status"], e5m2["reason"]) == ("supported", None)
    assert "compressed-tensors" in e5m2["engines"]["vllm"]["reason"]
    assert "transformer_engine" not in e5m2["engines"]
    assert choice(client, "h100", "norms", "bf16")["engines"] == {}


# -- the operator's file ---------------------------------------------------------


def test_an_added_device_takes_jobs(
    hardware_file: Path, tiny: Path, client: TestClient
) -> None:
    assert client.get("/v1/hardware/h800").json()["name"] == "H800 SXM5"
    job = client.post("/v1/optimize", json={**BODY, "hardware": "H800-SXM"})
    assert job.json()["request"]["hardware"] == "h800"


def test_a_file_that_breaks_a_rule_stops_the_start(hardware_file: Path) -> None:
    sparse = {**ADDED, "peak_dense_tflops": {"bf16": 989.4, "fp8": 3957.8}}
    hardware_file.write_text(json.dumps({"devices": [sparse]}))
    with pytest.raises(HardwareError, match=r"h800: peak_dense_tflops.fp8: FP8 at 4"):
        create_app()


def test_serve_says_which_row_breaks_a_rule(hardware_file: Path) -> None:
    hardware_file.write_text('{"devices": [{"id": "h800"}]}')
    command = [sys.executable, "-m", "api.cli", "serve", "--port", "0", "--data-dir"]
    done = subprocess.run(
        [*command, str(hardware_file.parent)], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "device h800: device: is missing" in done.stderr


def test_no_file_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECISION_HARDWARE_FILE", "")
    settings.cache_clear()
    assert settings().hardware_file is None


# -- what a job may ask a device for ---------------------------------------------


@pytest.mark.parametrize(
    ("name", "engine", "formats", "said"),
    [
        ("v100", None, ["fp8_e4m3", "fp8_e5m2"], "V100 SXM2 (Volta GV100) has no FP8"),
        ("v100", None, ["bf16"], "no bf16 arithmetic"),
        ("h100", "vllm", ["fp8_e5m2"], "has no e5m2"),
        ("h100", None, ["fp4_e2m1"], "no fp4_e2m1 matmul"),
    ],
)
def test_a_device_with_none_of_the_formats_is_told_at_once(
    tiny: Path,
    client: TestClient,
    refused: Refused,
    name: str,
    engine: str | None,
    formats: list[str],
    said: str,
) -> None:
    body = {**BODY, "hardware": name, "search": {"formats": formats}}
    answer = client.post("/v1/optimize", json={**body, "engine": engine})
    problem = refused(answer, 422, "unsupported_precision", "/search/formats")
    assert said in problem["detail"]
    for word in (name, *formats):
        assert word in problem["detail"]
    assert not set(problem["errors"][0]["known"]) & set(formats)
    assert "fp32" in problem["errors"][0]["known"]
    assert jobs_in_database() == 0


@pytest.mark.parametrize(
    ("name", "formats"),
    [("a100", ["fp8_e4m3"]), ("v100", ["bf16", "fp16"]), ("local", ["fp4_e2m1"])],
)
def test_one_format_that_a_device_has_is_enough(
    tiny: Path, client: TestClient, name: str, formats: list[str]
) -> None:
    body = {**BODY, "hardware": name, "search": {"formats": formats}}
    assert client.post("/v1/optimize", json=body).status_code == 202


def test_a_misspelled_device_is_refused_with_the_closest(
    tiny: Path, client: TestClient, refused: Refused
) -> None:
    answer = client.post("/v1/optimize", json={**BODY, "hardware": "h1000"})
    problem = refused(answer, 422, "unknown_hardware", "/hardware")
    assert "did you mean h100 or v100 or p100?" in problem["detail"]
    assert problem["errors"][0]["known"] == [*DEVICES, "local"]
