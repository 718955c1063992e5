"""What is left of a data sheet in practice, by device family: `data/fits.json`.

Each kind of kernel has a fixed time and the shares that it reaches of the device's
bandwidth and of its dense peak. `optimizer.fitting` finds them in the kernel tables and
says in the file where from: package, device, engine and version, how many rows, and how
far off the fit is on rows that it has not seen. A device without tables has its
family's; a family without tables, the nearest that has (`_LIKE`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from optimizer.hardware import LOCAL, Device

# Whose efficiencies stand in where nothing of the architecture was measured. An
# assumption, each; AMD's and Intel's have Hopper's as everything unknown does.
_LIKE = MappingProxyType({"6.0": "8.0", "7.0": "8.0", "7.5": "8.0", "8.6": "8.0"})
_UNKNOWN = "9.0"
PARTS = ("stream", "scaled", "context", "generation")  # of a fit, beside its GEMMs


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kind of kernel, timed as fixed + max(flops / reached, bytes / reached)."""

    fixed_s: float
    bandwidth_share: float = 1.0
    compute_share: float = 1.0
    error: float = 0.0  # median of the relative errors on rows held out of the fit


@dataclass(frozen=True, slots=True)
class Fit:
    """What the kernels of a device reach."""

    gemms: Mapping[str, Kernel] = field(hash=False)  # by the tables' formats
    stream: Kernel  # elementwise: every element in and out once
    scaled: Kernel  # the pass to FP8 that looks for its scale first
    context: Kernel  # attention over a prompt
    generation: Kernel  # attention of one token over a cache
    origin: str = ""

    def gemm(self, fmt: str) -> Kernel:
        """Return the kernel of a format; that of 16 bits where none was measured."""
        return self.gemms.get(fmt, self.gemms["bf16"])


_ALL = Kernel(0.0)
IDEAL = Fit({"bf16": _ALL}, _ALL, _ALL, _ALL, _ALL, "the data sheet")
"""Every kernel reaches the data sheet and takes no time to start: the physical limit."""


def fit(device: Device) -> Fit:
    """Return the fit of a device. A worker's own has measured what it reaches: all."""
    if device.id == LOCAL:
        return IDEAL
    return _fits()[family(device)]


def family(device: Device) -> str:
    """Return the compute capability whose kernels stand for a device's."""
    own = device.compute_capability or _UNKNOWN
    named = _LIKE.get(own, own)
    return named if named in _fits() else _UNKNOWN


@cache
def _fits() -> Mapping[str, Fit]:
    text = files("optimizer").joinpath("data/fits.json").read_text("utf-8")
    found = json.loads(text)["families"]
    # Where no pass to FP8 was timed, since nothing multiplies it: as if unknown.
    return MappingProxyType(
        {name: _fit({**found[_UNKNOWN], **entry}) for name, entry in found.items()}
    )


def _fit(entry: Mapping[str, Any]) -> Fit:
    def kernel(found: Mapping[str, Any]) -> Kernel:
        return Kernel(**{name: found[name] for name in Kernel.__slots__})

    parts = {name: kernel(entry[name]) for name in PARTS}
    return Fit(
        {fmt: kernel(found) for fmt, found in entry["gemms"].items()},
        **parts,
        origin=entry["origin"],
    )
