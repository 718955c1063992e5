"""The devices: `data/hardware.json`, checked.

Capabilities are looked up by exact architecture, never by "this version or later":
sm_120 is not a superset of sm_100, and CPU kernels accept what no GPU does.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from optimizer.errors import HardwareError

LOCAL = "local"  # the id of the worker's own device, whose figures it has measured

FP8_RATIO = (0.95, 2.05)  # FP8 over bf16 peak: outside, one of them is a sparse figure

# Ids, then further names, of the rows of the catalogue.
_IDS = {
    "P100 SXM2": ("p100",),
    "V100 SXM2": ("v100", "v100-16gb", "v100-sxm2"),
    "T4": ("t4",),
    "A10": ("a10",),
    "A100 SXM4 40GB": ("a100-40gb", "a100-sxm4-40gb", "a100-sxm-40gb"),
    "A100 SXM4 80GB": ("a100", "a100-80gb", "a100-sxm", "a100-sxm4", "a100-sxm4-80gb"),
    "A100 PCIe 40GB": ("a100-pcie-40gb",),
    "A100 PCIe 80GB": ("a100-pcie", "a100-pcie-80gb"),
    "L4": ("l4",),
    "L40S": ("l40s",),
    "RTX 4090": ("rtx-4090", "rtx4090"),
    "H100 SXM5": ("h100", "h100-sxm", "h100-sxm5", "h100-80gb"),
    "H100 PCIe": ("h100-pcie",),
    "H200 SXM": ("h200", "h200-sxm"),
    "H20": ("h20",),
    "GH200 96GB": ("gh200", "gh200-96gb"),
    "B200 (HGX)": ("b200",),
    "GB200 (per GPU)": ("gb200",),
    "RTX 5090": ("rtx-5090", "rtx5090"),
    "MI300X": ("mi300x",),
    "MI325X": ("mi325x",),
    "Gaudi 2": ("gaudi2", "gaudi-2"),
    "Gaudi 3": ("gaudi3", "gaudi-3"),
    # GH200 144GB has no id: no source read states its bandwidth.
}

# What the catalogue calls the formats to come. (Its rate for 6 bits is e3m2's too.)
_FORMATS = {"fp6": "fp6_e3m2", "fp4": "fp4_e2m1", "int8": "int8"}

# Where a kernel reads FP8 weights and computes in 16 bits (Marlin and its like).
# Gaudi 2 is absent: its e4m3 has another range than the OCP codes on disk.
_FP8_WEIGHTS = frozenset(
    {"8.0", "8.6", "8.9", "9.0", "10.0", "12.0", "gfx942", "Gaudi3 (HL-325L)"}
)
# Where a kernel reads int4 weights in groups and computes in 16 bits (Marlin).
_INT4_WEIGHTS = frozenset({"8.0", "8.6", "8.9", "9.0", "10.0", "12.0"})
# Where a kernel keeps K and V in FP8 and widens them as it reads: FlashInfer's, from
# Ampere on, and AMD's. No unit is needed (vLLM 0.25 docs, issue 4827).
_FP8_CACHE = frozenset({"8.0", "8.6", "8.9", "9.0", "10.0", "12.0", "gfx942"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A data sheet, in SI units; or, with the id "local", what a worker measured."""

    id: str
    name: str
    arch: str = ""
    compute_capability: str | None = None  # None: the vendor numbers nothing
    peak_flops: Mapping[str, float] = field(hash=False)  # dense FLOP/s, by format
    bandwidth_bytes_s: float
    memory_bytes: int
    native: frozenset[str]  # formats that its matrix units multiply
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def base16(self) -> str | None:
        """The 16-bit format of everything that is not narrowed; None: there is none."""
        return next((f for f in ("bf16", "fp16") if f in self.native), None)

    @property
    def fp8(self) -> tuple[str, ...]:
        """The 8-bit encodings that its matrix units take: OCP's, or AMD's fnuz ones."""
        return tuple(sorted(f for f in self.native if f.startswith("fp8")))

    @property
    def is_cpu(self) -> bool:
        """Whether this is a worker without an accelerator."""
        return self.id == LOCAL and self.compute_capability is None

    @property
    def reads_fp8_weights(self) -> bool:
        """Whether 8-bit weights can be stored and widened on the way in."""
        return self.is_cpu or (self.compute_capability or self.arch) in _FP8_WEIGHTS

    @property
    def keeps_fp8_cache(self) -> bool:
        """Whether K and V can be stored in 8 bits and widened on the way in."""
        return (self.compute_capability or self.arch) in _FP8_CACHE

    @property
    def reads_int4_weights(self) -> bool:
        """Whether 4-bit weights can be stored and widened on the way in."""
        return self.compute_capability in _INT4_WEIGHTS

    def multiplies(self, fmt: str) -> bool:
        """Whether the matrix units take `fmt`, in OCP's or in the fnuz encoding."""
        return fmt in self.native or f"{fmt}fnuz" in self.native


def _peaks(row: dict[str, Any]) -> dict[str, float]:
    rates = dict(row["peak_dense_tflops"])
    # RTX 5090: no source states its FP8 rate with FP32 accumulation.
    rates["fp8"] = rates["fp8"] or row.get("derived_estimates", {}).get(
        "fp8_fp32_accumulate"
    )
    kept = ("fp32", "fp16", "bf16", "fp8", *_FORMATS)
    return {_FORMATS.get(f, f): rates[f] * 1e12 for f in kept if rates[f]}


def _check(device: Device) -> Device:
    """Return the device. Raises HardwareError where its figures contradict each other."""
    peak = device.peak_flops
    low, high = FP8_RATIO
    if "fp8" in peak and not low <= peak["fp8"] / peak["bf16"] <= high:
        raise HardwareError(
            f"catalogue wrong: {device.id} has FP8 at {peak['fp8'] / peak['bf16']:.2f}"
            f" times bf16, outside [{low}, {high}]: a sparse figure?"
        )
    return device


def _device(row: dict[str, Any]) -> Device:
    peak = _peaks(row)
    # A format without a rate cannot be costed (Gaudi 2's fp32), so it is not native.
    native = {
        _FORMATS.get(f, f)
        for f, able in row["native_matmul"].items()
        if able and ("fp8" if f.startswith("fp8") else _FORMATS.get(f, f)) in peak
    }
    estimated = row["peak_dense_tflops"]["fp8"] is None and "fp8" in peak
    return Device(
        id=_IDS[row["device"]][0],
        name=f"{row['vendor']} {row['device']}",
        arch=row["arch"],
        compute_capability=row["compute_capability"],
        peak_flops=MappingProxyType(peak),
        bandwidth_bytes_s=row["memory_bandwidth_gbs"] * 1e9,
        memory_bytes=int(row["memory_gb"] * 1e9),
        native=frozenset(native),
        sources=tuple(row["sources"]),
        notes=(
            *row["notes"],
            *(["the FP8 rate is derived, not stated by a source"] if estimated else []),
        ),
    )


def _variants(row: dict[str, Any]) -> list[Device]:
    base = _device(row)
    sizes: list[int] = [v["memory_gb"] for v in row.get("variants", [])]
    others = [
        replace(
            base,
            id=f"{base.id}-{gb}gb",
            name=f"{base.name} {gb}GB",
            memory_bytes=int(gb * 1e9),
        )
        for gb in sizes
    ]
    return [base, *others]


def _read() -> dict[str, Device]:
    text = files("optimizer").joinpath("data/hardware.json").read_text("utf-8")
    rows = [r for r in json.loads(text)["devices"] if r["device"] in _IDS]
    devices = [_check(d) for row in rows for d in _variants(row)]
    return {d.id: d for d in devices}


DEVICES: Mapping[str, Device] = MappingProxyType(_read())
"""Every device of the catalogue that can be costed, by id."""

_ALIASES = {alias: names[0] for names in _IDS.values() for alias in names}


def device(name: str) -> Device:
    """Return the device with this id or alias (case, `_` and spaces do not matter).

    Raises HardwareError listing the ids; "local" is not in the catalogue, since
    only a worker knows what it runs on.
    """
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    found = DEVICES.get(_ALIASES.get(wanted, wanted))
    if found is None:
        raise HardwareError(f"unknown hardware {name!r}; known: {', '.join(DEVICES)}")
    return found
