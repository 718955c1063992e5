"""Which device computed a job: the driver's own words, and nobody's serial number."""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from workers import device

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
