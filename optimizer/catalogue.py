"""Rows of the hardware catalogue, checked: what breaks a rule is named with its field.

`data/hardware.json` and an operator's file have the same form, an object of
`architectures` and `devices`. A row of the file with an id that exists replaces the
fields that it has; one with a new id must have all that a device needs.
"""

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from optimizer.errors import HardwareError
from optimizer.fields import (
    flag,
    many,
    not_negative,
    one_of,
    or_null,
    positive,
    record,
    table,
    text,
)
from optimizer.support import Scaling

LOCAL = "local"  # the id of the worker's own device, whose figures it has measured
FP8_RATIO = (0.95, 2.05)  # FP8 over bf16 peak: outside, one of them is a sparse figure
RIDGE = (1.0, 1e4)  # 16-bit FLOP per byte, 29 to 403 in ours: outside, a slip of units
ROUNDED = 1.01  # data sheets round: 74.45 TFLOP/s of a B200 are "75"
RATES = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp6_e3m2", "fp4_e2m1", "int4")
NATIVE = (
    *("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "fp8_e5m2fnuz"),
    *("fp6_e3m2", "fp4_e2m1", "int8"),
)
STORED = ("fp8_e4m3", "fp8_e5m2", "int4")

Json = dict[str, Any]


def _name(value: Any) -> str | None:
    known = isinstance(value, str) and re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,62}", value)
    if not known:
        return "must be lower-case letters, digits, dots and hyphens, 63 at most"
    return f"{LOCAL} is the worker's own device" if value == LOCAL else None


_PAIR = {
    "input": one_of(NATIVE),
    "weight": one_of(NATIVE),
    "scalings": many(one_of(tuple(Scaling))),
}
_ARCHITECTURE = record(
    {
        "name": text,
        "native": many(one_of(NATIVE)),
        "matmul": many(record(_PAIR, _PAIR)),
        "stored_weights": many(one_of(STORED)),
        "stored_cache": many(one_of(STORED)),
        "cache_scale_per_head": flag,
        "attention": many(one_of(STORED)),
        "other_kernels": table(one_of(tuple(Scaling)), text),
        "sources": many(text),
    },
    ("native",),
)
_LINK = {"kind": text, "bidirectional_gbs": not_negative}
_UNITS = {
    "count": positive,
    "clock_mhz": positive,
    "flop_per_clock": table(one_of(RATES), positive),
    "source": text,
}
_DEVICE = record(
    {
        "id": _name,
        "aliases": many(_name),
        "vendor": text,
        "device": text,
        "arch": text,
        "compute_capability": or_null(text),
        "peak_dense_tflops": table(one_of(RATES), positive),
        "derived_tflops": table(one_of(RATES), positive),
        "derived_basis": text,
        "memory_gb": positive,
        "memory_type": text,
        "memory_bandwidth_gbs": positive,
        "interconnect": record(_LINK, _LINK),
        "tdp_w": positive,
        "units": record(_UNITS, _UNITS),
        "notes": many(text),
        "sources": many(text),
    },
    ("id", "device", "peak_dense_tflops", "memory_gb", "memory_bandwidth_gbs"),
)
_FILE = record(
    {
        "_about": lambda _: None,
        "architectures": table(text, _ARCHITECTURE),
        "devices": many(
            lambda row: None if isinstance(row, dict) else "must be an object"
        ),
    },
    (),
)


def architecture_of(row: Json) -> str:
    """Return the key of a device's architecture; "" where the row names none."""
    return row.get("compute_capability") or row.get("arch") or ""


def rates(row: Json) -> dict[str, float]:
    """Return dense TFLOP/s by format, those that are derived among them."""
    return {**row.get("derived_tflops", {}), **row["peak_dense_tflops"]}


def contradiction(row: Json, architectures: Mapping[str, Json]) -> str | None:
    """Say which figures of a well-formed device contradict each other, or None."""
    key = architecture_of(row)
    if key not in architectures:
        return (
            f"compute_capability: {key!r} is no architecture of the catalogue; "
            f"add it under `architectures`, or take one of {', '.join(architectures)}"
        )
    peak = rates(row)
    native = architectures[key]["native"]
    if not any(fmt in peak and fmt in native for fmt in ("bf16", "fp16")):
        return "peak_dense_tflops: needs a rate of bf16 or fp16 that is native"
    return _sparse(peak) or _beyond(peak, row.get("units")) or _slipped(row, peak)


def _sparse(peak: Mapping[str, float]) -> str | None:
    low, high = FP8_RATIO
    if "fp8" not in peak:
        return None
    if "bf16" not in peak:
        return "peak_dense_tflops.fp8: there is no bf16 to hold it against"
    ratio = peak["fp8"] / peak["bf16"]
    if low <= ratio <= high:
        return None
    return (
        f"peak_dense_tflops.fp8: FP8 at {ratio:.2f} times bf16 is outside "
        f"[{low}, {high}]: a sparse figure?"
    )


def _beyond(peak: Mapping[str, float], units: Json | None) -> str | None:
    """Nothing computes faster than all of its units at their highest clock."""
    for fmt, each in (units or {}).get("flop_per_clock", {}).items():
        assert units is not None
        limit = units["count"] * units["clock_mhz"] * each / 1e6  # TFLOP/s
        if peak.get(fmt, 0.0) > ROUNDED * limit:
            return (
                f"peak_dense_tflops.{fmt}: {peak[fmt]:g} is beyond {units['count']} "
                f"units × {units['clock_mhz']} MHz × {each} FLOP per clock = "
                f"{limit:.1f} TFLOP/s: a sparse figure?"
            )
    return None


def _slipped(row: Json, peak: Mapping[str, float]) -> str | None:
    """TFLOP/s and GB/s, or what was meant for them."""
    low, high = RIDGE
    fmt = "bf16" if "bf16" in peak else "fp16"
    ridge = peak[fmt] * 1e3 / row["memory_bandwidth_gbs"]
    if low <= ridge <= high:
        return None
    return (
        f"memory_bandwidth_gbs: {ridge:g} FLOP per byte in {fmt} are outside "
        f"[{low:g}, {high:g}]: are the peaks in TFLOP/s and the bandwidth in GB/s?"
    )


def read(file: Path | None) -> tuple[dict[str, Json], list[Json]]:
    """Return architectures and devices, the operator's file laid over our own.

    Raises HardwareError naming the file, the row and the field that break a rule.
    """
    own = files("optimizer").joinpath("data/hardware.json").read_text("utf-8")
    architectures, devices = _laid_over(own, "data/hardware.json", {}, {})
    if file is not None:
        name = f"hardware file {file}"
        try:
            content = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise HardwareError(f"{name} cannot be read: {error}") from None
        architectures, devices = _laid_over(content, name, architectures, devices)
    return architectures, list(devices.values())


def _laid_over(
    content: str, name: str, architectures: dict[str, Json], devices: dict[str, Json]
) -> tuple[dict[str, Json], dict[str, Json]]:
    """Return both tables with those of `content` laid over them. Raises HardwareError."""
    try:
        document = json.loads(content)
    except ValueError as error:
        raise HardwareError(f"{name} is not JSON: {error}") from None
    _require(name, _FILE(document))
    architectures = {**architectures, **document.get("architectures", {})}
    merged = dict(devices)
    for number, row in enumerate(document.get("devices", ())):
        key = str(row.get("id", number))
        full = {**merged.get(key, {}), **row}
        wrong = _DEVICE(full) or contradiction(full, architectures)
        _require(f"{name}: device {key}", wrong)
        merged[key] = full
    for alias, owners in _owners(merged).items():
        twice = f"aliases: {alias} is another name of {' and '.join(owners)}"
        _require(f"{name}: device {owners[-1]}", twice if len(owners) > 1 else None)
    return architectures, merged


def _owners(devices: Mapping[str, Json]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in devices.values():
        for name in {row["id"], *row.get("aliases", ())}:
            found.setdefault(name, []).append(row["id"])
    return found


def _require(where: str, wrong: str | None) -> None:
    if wrong is not None:
        raise HardwareError(f"catalogue wrong: {where}: {wrong}")
