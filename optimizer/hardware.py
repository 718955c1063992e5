"""The devices: `data/hardware.json`, and what an operator adds to it.

`catalogue` checks the rows, `support` knows the kernels of each architecture, and
`rules` decides what a site may get.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from optimizer import catalogue, support
from optimizer.catalogue import LOCAL as LOCAL
from optimizer.errors import HardwareError
from optimizer.support import Support

# The formats of whose rates the cost model knows: those that a choice may name.
_COSTED = ("fp32", "fp16", "bf16", "fp8", "fp6_e3m2", "fp4_e2m1", "int8")


@dataclass(frozen=True, slots=True)
class Units:
    """What multiplies: streaming multiprocessors, compute units."""

    count: int
    clock_hz: float  # the highest
    flop_per_clock: Mapping[str, float] = field(hash=False)  # dense, of one unit
    source: str


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
    aliases: tuple[str, ...] = ()
    memory_type: str | None = None
    tdp_w: float | None = None
    link: str | None = None  # how it talks to others of its kind
    link_bytes_s: float | None = None  # in one direction; 0: over the host only
    units: Units | None = None  # None: no source states them

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
    def support(self) -> Support:
        """The kernels of its architecture, by exact match."""
        return _support.get(self.compute_capability or self.arch, support.NONE)

    @property
    def reads_fp8_weights(self) -> bool:
        """Whether 8-bit weights can be stored and widened on the way in."""
        return self.is_cpu or "fp8_e4m3" in self.support.stored_weights

    @property
    def reads_int4_weights(self) -> bool:
        """Whether 4-bit weights can be stored and widened on the way in."""
        return "int4" in self.support.stored_weights

    def multiplies(self, fmt: str) -> bool:
        """Whether the matrix units take `fmt`, in OCP's or in the fnuz encoding."""
        return fmt in self.native or f"{fmt}fnuz" in self.native

    def peak(self, fmt: str) -> float:
        """Return dense FLOP/s in `fmt`. KeyError where no rate is known."""
        return self.peak_flops[_rate_of(fmt)]


def _rate_of(fmt: str) -> str:
    return "fp8" if fmt.startswith("fp8") else fmt  # all of them at one rate


def utilization(device: Device, fmt: str, flops: float, seconds: float) -> float:
    """Return the share of the peak that a run of `flops` in `seconds` came to (MFU).

    Raises HardwareError over 1, which no run can be: the catalogue is wrong, or the
    count or the clock is.
    """
    share = flops / seconds / device.peak(fmt)
    if share > 1:
        raise HardwareError(
            f"catalogue wrong: {flops / seconds / 1e12:.1f} TFLOP/s of {fmt} were "
            f"measured on {device.id}, {share:.0%} of the peak that it lists"
        )
    return share


def _device(row: dict[str, Any], known: Mapping[str, Support]) -> Device:
    """Return what a checked row says. A format without a rate cannot be costed, so
    it is not native (Gaudi 2's fp16).
    """
    peak = {f: t * 1e12 for f, t in catalogue.rates(row).items() if f in _COSTED}
    kernels = known[catalogue.architecture_of(row)]
    native = {f for f in kernels.native if _rate_of(f) in peak}
    derived = sorted(set(row.get("derived_tflops", ())) & peak.keys())
    basis = row.get("derived_basis", "no source states it")
    link = row.get("interconnect", {})
    return Device(
        id=row["id"],
        name=" ".join(filter(None, (row.get("vendor"), row["device"]))),
        arch=row.get("arch", ""),
        compute_capability=row.get("compute_capability"),
        peak_flops=MappingProxyType(peak),
        bandwidth_bytes_s=row["memory_bandwidth_gbs"] * 1e9,
        memory_bytes=int(row["memory_gb"] * 1e9),
        native=frozenset(native),
        sources=tuple(row.get("sources", ())),
        notes=(
            *row.get("notes", ()),
            *(f"the {fmt} rate is derived: {basis}" for fmt in derived),
        ),
        aliases=tuple(row.get("aliases", ())),
        memory_type=row.get("memory_type"),
        tdp_w=row.get("tdp_w"),
        link=link.get("kind"),
        link_bytes_s=link["bidirectional_gbs"] / 2 * 1e9 if link else None,
        units=_units(row["units"]) if "units" in row else None,
    )


def _units(row: dict[str, Any]) -> Units:
    return Units(
        count=row["count"],
        clock_hz=row["clock_mhz"] * 1e6,
        flop_per_clock=MappingProxyType(row["flop_per_clock"]),
        source=row["source"],
    )


_support: dict[str, Support] = {}
_devices: dict[str, Device] = {}
_aliases: dict[str, str] = {}

DEVICES: Mapping[str, Device] = MappingProxyType(_devices)
"""Every device of the catalogue, by id; `use` changes what is in it."""

SUPPORT: Mapping[str, Support] = MappingProxyType(_support)
"""The kernels of every architecture, by compute capability or name."""


def use(file: Path | None) -> None:
    """Read the catalogue again, with the operator's file laid over it; None: without.

    API and workers do this as they start. Raises HardwareError naming what breaks a
    rule; the catalogue is then what it was.
    """
    architectures, rows = catalogue.read(file)
    found = {key: Support.read(row) for key, row in architectures.items()}
    devices = {row["id"]: _device(row, found) for row in rows}
    names = {alias: d.id for d in devices.values() for alias in (d.id, *d.aliases)}
    for table in (_support, _devices, _aliases):
        table.clear()
    _support.update(found)
    _devices.update(devices)
    _aliases.update(names)


use(None)


def device(name: str) -> Device:
    """Return the device with this id or alias (case, `_` and spaces do not matter).

    Raises HardwareError with the closest names and the ids; "local" is not in the
    catalogue, since only a worker knows what it runs on.
    """
    found = DEVICES.get(_aliases.get(_plain(name), ""))
    if found is None:
        close = closest(name)
        meant = f"did you mean {' or '.join(close)}? " if close else ""
        known = ", ".join(DEVICES)
        shown = repr(name[:64])  # a caller may send any length
        raise HardwareError(f"unknown hardware {shown}; {meant}known: {known}")
    return found


def closest(name: str) -> list[str]:
    """Return the ids, at most three, that a misspelled name may stand for."""
    names = {**_aliases, LOCAL: LOCAL}
    close = difflib.get_close_matches(_plain(name)[:64], names, n=8, cutoff=0.6)
    return list(dict.fromkeys(names[each] for each in close))[:3]


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")
