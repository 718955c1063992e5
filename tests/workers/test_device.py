"""Which device computed a job: the driver's own words, and nobody's serial number."""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.metrics import Metrics
from workers import app, device

UUID = "GPU-9c1e2b5a-0000-4b7e-8f00-1d2c3b4a5968"
Install = Callable[[str], Path]


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a program of this text first on the path."""

    def install(text: str) -> Path:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return program

    device.identity.cache_clear()
    yield install
    device.identity.cache_clear()


def test_a_gpu_is_known_by_a_digest(nvidia_smi: Install) -> None:
    nvidia_smi(f"echo '580.65.06, {UUID}'; echo '580.65.06, GPU-second'")
    digest = hashlib.sha256(UUID.encode()).hexdigest()
    assert device.identity() == {"driver": "580.65.06", "device_uuid_hash": digest}


def test_the_gpu_is_the_one_that_the_process_sees(
    nvidia_smi: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi('for last; do :; done; echo "580.65.06, $last"')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    digest = hashlib.sha256(b"--id=3").hexdigest()
    assert device.identity()["device_uuid_hash"] == digest


@pytest.mark.parametrize("text", ["exit 9", "echo no devices", "exit 0"])
def test_where_no_gpu_answers_nothing_is_said(nvidia_smi: Install, text: str) -> None:
    nvidia_smi(text)
    assert device.identity() == {"driver": None, "device_uuid_hash": None}


# -- memory ----------------------------------------------------------------------------


def shown() -> dict[str, float]:
    text = Metrics(lambda: 0).render().decode()
    (family,) = (
        found
        for found in text_string_to_metric_families(text)
        if found.name == "precision_gpu_memory_used_bytes"
    )
    return {sample.labels["device"]: sample.value for sample in family.samples}


def test_memory_in_use_comes_from_the_driver_to_prometheus(
    nvidia_smi: Install, sqlite: Path
) -> None:
    nvidia_smi(f"echo 'NVIDIA H200, {UUID}, 1024'; echo 'NVIDIA L4, GPU-b, [N/A]'")
    app.show_gpus()
    name = f"NVIDIA H200 {hashlib.sha256(UUID.encode()).hexdigest()[:8]}"
    assert shown() == {name: 2**30}


def test_every_gpu_that_the_worker_sees_is_asked_for(
    nvidia_smi: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi('for last; do :; done; echo "A, $(echo $last | tr , +), 1"')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    digest = hashlib.sha256(b"--id=3+5").hexdigest()
    assert device.memory_used() == {f"A {digest[:8]}": 2**20}


@pytest.mark.parametrize("text", ["exit 9", "echo no devices", "exit 0"])
def test_where_no_gpu_answers_there_is_no_series(
    nvidia_smi: Install, sqlite: Path, text: str
) -> None:
    nvidia_smi(text)
    app.show_gpus()
    assert shown() == {}


def test_where_no_driver_is_there_is_no_series(
    sqlite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert device.program() is None
    app.show_gpus()
    assert shown() == {}
