"""What an operator's file may add, and what it may not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optimizer import hardware
from optimizer.errors import HardwareError
from optimizer.hardware import DEVICES, SUPPORT, device

NEW: dict[str, Any] = {
    "id": "h800",
    "device": "H800 SXM5",
    "compute_capability": "9.0",
    "peak_dense_tflops": {"fp32": 66.9, "bf16": 989.4, "fp8": 1978.9},
    "memory_gb": 80,
    "memory_bandwidth_gbs": 3350,
}
UNITS = {"count": 132, "clock_mhz": 1980, "flop_per_clock": {"bf16": 4096}}


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """Give a place for the operator's file; the catalogue is ours again afterwards."""
    yield tmp_path / "hardware.json"
    hardware.use(None)


def write(file: Path, *rows: Any, **more: Any) -> None:
    file.write_text(json.dumps({"devices": rows, **more}))


def test_a_device_is_added(file: Path) -> None:
    before = dict(DEVICES)
    write(file, {**NEW, "aliases": ["h800-sxm"]})
    hardware.use(file)
    assert device("H800 SXM").name == "H800 SXM5"
    assert device("h800").fp8 == device("h100").fp8
    assert device("h800").units is None
    assert {**before, "h800": device("h800")} == dict(DEVICES)
    hardware.use(None)
    assert dict(DEVICES) == before


def test_a_row_with_a_known_id_replaces_the_fields_that_it_has(file: Path) -> None:
    write(file, {"id": "h100", "memory_bandwidth_gbs": 3000})
    hardware.use(file)
    assert device("h100-sxm").bandwidth_bytes_s == 3000e9
    assert device("h100").peak_flops["bf16"] == pytest.approx(989.4e12)


def test_an_architecture_is_added_with_its_kernels(file: Path) -> None:
    kernels = {
        "native": ["fp32", "bf16", "fp8_e4m3"],
        "matmul": [{"input": "fp8_e4m3", "weight": "fp8_e4m3", "scalings": ["tensor"]}],
        "stored_weights": ["fp8_e4m3"],
    }
    row = {**NEW, "compute_capability": "gfx950"}
    write(file, row, architectures={"gfx950": kernels}, _about="ours")
    hardware.use(file)
    assert device("h800").support is SUPPORT["gfx950"]
    assert device("h800").reads_fp8_weights
    assert not device("h800").reads_int4_weights


def changed(**fields: Any) -> dict[str, Any]:
    return {**NEW, **fields}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in NEW.items() if key != name}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        # Sparse figures: 3957.8 / 989.4 = 4.00, and 132 · 1.98e9 · 4096 = 1070.5e12.
        (
            changed(peak_dense_tflops={"bf16": 989.4, "fp8": 3957.8}),
            r"h800: peak_dense_tflops\.fp8: FP8 at 4\.00 times bf16 is outside",
        ),
        (
            changed(peak_dense_tflops={"bf16": 1978.9}, units={**UNITS, "source": "s"}),
            r"h800: peak_dense_tflops\.bf16: 1978\.9 is beyond 132 units .* 1070\.5",
        ),
        (
            changed(peak_dense_tflops={"fp16": 125.0, "fp8": 250.0}),
            r"peak_dense_tflops\.fp8: there is no bf16",
        ),
        (changed(peak_dense_tflops={"fp32": 1.0}), "needs a rate of bf16 or fp16"),
        # 989.4e12 / 3.35e12 are 295 FLOP per byte; TB/s for GB/s make it 295 thousand.
        (changed(memory_bandwidth_gbs=3.35), "bandwidth_gbs: 295343 FLOP per byte"),
        (changed(memory_bandwidth_gbs=3350e9), "2.95343e-07 FLOP per byte in bf16"),
        (changed(peak_dense_tflops={"bf17": 1.0}), r"tflops: bf17: 'bf17' is none of"),
        (changed(peak_dense_tflops=[1.0]), "peak_dense_tflops: must be an object"),
        (without("memory_gb"), "h800: memory_gb: is missing"),
        (without("compute_capability"), "compute_capability: '' is no architecture"),
        (changed(compute_capability="9.9"), "'9.9' is no architecture .*, 9.0,"),
        (changed(compute_capability=9.0), "compute_capability: must be a text"),
        (changed(compute_capability=[]), "compute_capability: must be a text"),
        (changed(memory_bandwidth_gbs=-1), "memory_bandwidth_gbs: must be a finite"),
        (changed(memory_bandwidth_gbs="3350"), "memory_bandwidth_gbs: must be a fin"),
        (changed(memory_gb=float("inf")), "memory_gb: must be a finite number above 0"),
        (changed(memory_gb=float("nan")), "memory_gb: must be a finite number above 0"),
        (changed(tdp_w=True), "tdp_w: must be a finite number above 0"),
        (changed(bandwidth=3350), "bandwidth: there is no such field"),
        (changed(units=UNITS), "units: source: is missing"),
        (changed(units=None), "units: must be an object"),
        (changed(notes="fast"), "notes: must be a list"),
        (changed(sources=["x", ""]), "sources: 1: must be a text"),
        (
            changed(interconnect={"kind": "x", "bidirectional_gbs": False}),
            "bidirectional_gbs: must be a finite number, 0 or more",
        ),
        (changed(id="local"), "device local: id: local is the worker's own device"),
        (changed(id="H 800"), "id: must be lower-case letters"),
        (changed(id=7), "id: must be lower-case letters"),
        (changed(aliases=["h100"]), "h800: aliases: h100 is another name of h100 and"),
        ({"device": "nameless"}, "device 0: id: is missing"),
        ("h100", "devices: 0: must be an object"),
    ],
)
def test_a_row_that_breaks_a_rule_is_named_with_its_field(
    file: Path, row: Any, said: str
) -> None:
    before = dict(DEVICES)
    write(file, row)
    with pytest.raises(HardwareError, match=r"wrong: hardware file .*" + said):
        hardware.use(file)
    assert dict(DEVICES) == before


@pytest.mark.parametrize(
    ("architectures", "said"),
    [
        ([], "architectures: must be an object"),
        ({"9.0": {}}, r"architectures: 9\.0: native: is missing"),
        ({"9.0": {"native": ["fp9"]}}, "native: 0: 'fp9' is none of"),
        ({"9.0": {"native": [[]]}}, r"native: 0: \[\] is none of"),
        (
            {"9.0": {"native": [], "cache_scale_per_head": 1}},
            "cache_scale_per_head: must be true or false",
        ),
    ],
)
def test_an_architecture_that_breaks_a_rule_is_named(
    file: Path, architectures: Any, said: str
) -> None:
    write(file, architectures=architectures)
    with pytest.raises(HardwareError, match=said):
        hardware.use(file)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "is not JSON"),
        (b"[]", "must be an object"),
        (b'{"device": []}', "device: there is no such field"),
        (b"\xff\xfe\x00", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_catalogue_is_refused(
    file: Path, content: bytes | None, said: str
) -> None:
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(HardwareError, match=said):
        hardware.use(file)


def test_an_optional_link_of_zero_means_over_the_host(file: Path) -> None:
    link = {"kind": "PCIe", "bidirectional_gbs": 0}
    write(file, changed(interconnect=link))
    hardware.use(file)
    assert (device("h800").link, device("h800").link_bytes_s) == ("PCIe", 0)
    assert device("h100").link_bytes_s == 450e9  # NVLink4: 900 GB/s in both directions
