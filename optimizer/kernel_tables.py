"""What was measured of an engine's kernels on a device, and how it is read.

A reading is exact where a shape was measured, linear between shapes that were, and None
elsewhere: nothing is extrapolated.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimizer.attention_times import Section
from optimizer.fits import Fit, Kernel
from optimizer.grid import Grid, Reading

ATTENTION = ("context", "generation")  # parts of a fit, beside its GEMMs
Window = int | None  # tokens that attention looks back on; None: all of them
Layout = tuple[str, int, int]  # cache format, head size, window (0: none)


class Basis(StrEnum):
    """Where a latency comes from (README, "What the figures mean")."""

    MEASURED = "measured"
    KERNELS = "kernels"
    ROOFLINE = "roofline"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a kernel."""

    seconds: float
    error: float  # relative; leave-one-out of the axes read between points; 0 at one


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """What was measured of one engine on one device."""

    device: str  # an id of the catalogue
    engine: str
    version: str  # of the engine
    basis: Basis
    origin: str  # who measured it
    facts: Mapping[str, Any] = field(default_factory=dict)  # license, driver, date, …
    gemms: Mapping[str, Grid] = field(default_factory=dict)  # m × n × k, by format
    context: Mapping[Layout, Section] = field(default_factory=dict)
    generation: Mapping[Layout, Section] = field(default_factory=dict)
    casts: Mapping[str, Grid] = field(default_factory=dict)  # rows × columns
    reductions: Mapping[int, Grid] = field(default_factory=dict)  # bytes, by GPUs
    # What brings the roofline to the rows: of GEMMs by format, and of attention.
    corrections: Mapping[str, Kernel] = field(default_factory=dict)

    def corrected(self, fit: Fit) -> Fit:
        """Return a fit with what was found here in place of what it says."""
        if not self.corrections:
            return fit
        own = self.corrections
        return replace(
            fit,
            gemms={**fit.gemms, **{k: v for k, v in own.items() if k not in ATTENTION}},
            context=own.get("context", fit.context),
            generation=own.get("generation", fit.generation),
        )

    def gemm(self, fmt: str, m: int, n: int, k: int) -> Timing | None:
        """Return the time of m × k times k × n in `fmt`, by the tables' own names."""
        found = self.gemms.get(fmt)
        return _timing(found.at(m, n, k) if found else None)

    def context_attention(
        self,
        kv_fmt: str,
        batch: int,
        tokens: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        window: Window = None,
    ) -> Timing | None:
        """Return the time of causal attention over `tokens` of each sequence."""
        found = _section(self.context, kv_fmt, head_dim, window, tokens)
        return _timing(found.at(heads, kv_heads, batch, tokens) if found else None)

    def generation_attention(
        self,
        kv_fmt: str,
        batch: int,
        context: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        window: Window = None,
    ) -> Timing | None:
        """Return the time of one token's attention to a context that includes it."""
        found = _section(self.generation, kv_fmt, head_dim, window, context)
        return _timing(found.at(heads, kv_heads, batch, context) if found else None)

    def quantize(
        self, rows: int, columns: int, *, dynamic: bool = False
    ) -> Timing | None:
        """Return the time from bf16 to FP8, the scale known or (dynamic) to be found."""
        found = self.casts.get("dynamic" if dynamic else "static")
        return _timing(found.at(rows, columns) if found else None)

    def all_reduce(self, gpus: int, bytes_: int) -> Timing | None:
        """Return the time to sum a tensor of `bytes_` over GPUs that each hold one."""
        found = self.reductions.get(gpus)
        return _timing(found.at(bytes_) if found else None)

    def leave_one_out(self, op: str, fmt: str) -> NDArray[np.float64]:
        """Return (predicted - measured) / measured of every point from its neighbors.

        `op` is a method's name, `fmt` the format that it takes: that of the cache for
        attention, "static" or "dynamic" for quantize, the number of GPUs for
        all_reduce. Empty where nothing was measured. The neighbors of a point are two
        gaps apart, so the readings of `op` are nearer than this.
        """
        if op in ("context_attention", "generation_attention"):
            kept = self.context if op == "context_attention" else self.generation
            parts = [
                s.leave_one_out() for layout, s in kept.items() if layout[0] == fmt
            ]
        else:
            grids: Mapping[str, Grid] = {
                "gemm": self.gemms,
                "quantize": self.casts,
                "all_reduce": {str(n): g for n, g in self.reductions.items()},
            }[op]
            found = grids.get(fmt)
            axes = range(len(found.axes)) if found else ()
            parts = [found.leave_one_out(i) for i in axes] if found else []
        return np.concatenate([np.empty(0), *parts])


def _section(
    kept: Mapping[Layout, Section], fmt: str, head_dim: int, window: Window, seen: int
) -> Section | None:
    """Return the times of a layout. A window as long as what is seen is none."""
    reach = 0 if window is None or window >= seen else window
    return kept.get((fmt, head_dim, reach))


def _timing(reading: Reading | None) -> Timing | None:
    return None if reading is None else Timing(reading.seconds, reading.error)
