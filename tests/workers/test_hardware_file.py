"""A job's process knows the operator's devices, as the API does."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from optimizer import hardware
from workers import child
from workers.child import Start

ROW = {
    "id": "h800",
    "device": "H800 SXM5",
    "compute_capability": "9.0",
    "peak_dense_tflops": {"bf16": 989.4, "fp8": 1978.9},
    "memory_gb": 80,
    "memory_bandwidth_gbs": 3350,
}


def test_a_job_finds_the_device_that_the_api_took(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = ModuleType("torch")  # seconds to import
    torch.set_num_threads = lambda count: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    file = data_dir / "hardware.json"
    file.write_text(json.dumps({"devices": [ROW]}))
    start = Start("optimize", {}, str(data_dir), 0, "off", hardware_file=str(file))
    try:
        child._prepare(start)
        assert hardware.device("h800").name == "H800 SXM5"
    finally:
        hardware.use(None)
