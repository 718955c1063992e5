from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from optimizer import device_state
from optimizer.device_state import catalogue_id, cpu_name, facts, gpu, name, state


@pytest.mark.parametrize(
    ("named", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB300", "gb300"),
        ("Tesla T4", "t4"),
        ("NVIDIA T400", "local"),
        ("AMD EPYC", "local"),
    ],
)
def test_a_device_is_known_by_the_words_of_its_name(named: str, device: str) -> None:
    assert catalogue_id(named) == device


def test_a_processor_is_named_as_the_kernel_has_it(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name\t: AMD EPYC 9B14\n")
    assert cpu_name(info) == "AMD EPYC 9B14"
    assert cpu_name(tmp_path / "none")  # what Python knows


def test_the_device_of_this_process_says_what_it_runs() -> None:
    said = facts()
    assert said["name"] == name()
    assert said["threads"] == torch.get_num_threads()
    assert said["versions"]["torch"] == torch.__version__


def test_an_accelerator_comes_before_the_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100 PCIe")
    assert name() == "NVIDIA H100 PCIe"


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put an nvidia-smi that answers by a script where it is looked for."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_clocks_and_temperature_are_those_that_the_machine_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, monkeypatch, "echo '550.54, 1980, [N/A], 41'")
    assert gpu()["driver_version"] == "550.54"
    told = state()
    assert told["clocks.sm"] == 1980
    assert told["temperature.gpu"] == 41
    assert "clocks.mem" not in told
    assert facts()["driver"] == "550.54"


def test_a_gpu_that_does_not_answer_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, monkeypatch, "echo no devices; exit 9")
    assert gpu() == {}
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert gpu() == {}


def test_a_machine_without_sensors_tells_its_load_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_state, "gpu", dict)
    monkeypatch.setattr(psutil, "cpu_freq", lambda: None)
    monkeypatch.setattr(psutil, "sensors_temperatures", dict, raising=False)
    assert state().keys() == {"load"}
    warm = {"k10temp": [SimpleNamespace(current=55.0), SimpleNamespace(current=61.0)]}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: warm, raising=False)
    monkeypatch.setattr(psutil, "cpu_freq", lambda: SimpleNamespace(current=2600.0))
    assert state()["cpu_celsius"] == 61.0
    assert state()["cpu_mhz"] == 2600.0
