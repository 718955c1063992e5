"""Makes `data/fits.json` from the kernel tables: `python -m optimizer.fitting`.

For each kind of kernel three numbers, those of `fits.Kernel`, that bring the roofline
nearest to what was measured: least squares of the logarithm, outliers counted by their
distance only. A fifth of the rows is held out; the error that a fit states is the median
on those. Rows smaller than any model's (`SMALLEST`) say nothing about models.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from optimizer.fits import PARTS, Kernel
from optimizer.hardware import DEVICES, Device
from optimizer.kernels import Tables, tables
from optimizer.roofline import QUANTIZE_BYTES
from optimizer.sizes import size_bytes

SMALLEST = 512  # inputs and outputs of a matrix
HELD_OUT = 5  # every fifth row
# What a pass reads, a kernel before it has just written: a large cache may still hold
# it, so a pass may beat the memory. By how much more is not asked.
CACHED = 2.0
ROWS = 20_000  # of a kind and device, at most: drawn evenly
# The tables' names of GEMMs: bytes of a weight and of an input, the peak, the cast.
_GEMMS = {
    "bf16": ("bf16", "bf16", None),
    "fp8": ("fp8_e4m3", "fp8", "dynamic"),
    "fp8_block": ("fp8_e4m3", "fp8", None),  # the cast stays inside: it was not timed
    "nvfp4": ("fp4_e2m1", "fp4_e2m1", None),
    "int8": ("int8", "int8", None),
}

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rows:
    """What some kernels were given and took; (rows,) each."""

    compute_s: Values  # at the dense peak
    memory_s: Values  # at the whole bandwidth
    beside_s: Values  # of another kernel, that was timed with this one
    seconds: Values

    @property
    def held_out(self) -> NDArray[np.bool_]:
        """Which rows a fit does not see: those whose place is drawn, by a fixed seed."""
        draw = np.random.default_rng(0).permutation(len(self.seconds))
        return draw % HELD_OUT == 0

    def of(self, wanted: NDArray[np.bool_]) -> "Rows":
        """Return some of the rows."""
        return Rows(*(getattr(self, name)[wanted] for name in Rows.__slots__))


def predicted(kernel: Kernel, rows: Rows) -> Values:
    """Return the seconds of the roofline under a fit."""
    longer = np.maximum(
        rows.compute_s / kernel.compute_share, rows.memory_s / kernel.bandwidth_share
    )
    return kernel.fixed_s + longer + rows.beside_s


def errors(kernel: Kernel, rows: Rows) -> Values:
    """Return (predicted - measured) / measured."""
    return predicted(kernel, rows) / rows.seconds - 1


def fit_kernel(rows: Rows, most: float = 1.0) -> Kernel:
    """Return the fit of a kind of kernel, with its error on the rows held out.

    It reaches no more than `most` of the bandwidth.
    """
    seen = rows.of(~rows.held_out)
    start = np.array([np.log(seen.seconds.min()), np.log(0.7), np.log(0.7)])

    def residuals(x: Values) -> Values:
        return np.log(predicted(_kernel(x), seen) / seen.seconds)

    bounds = (np.log([1e-8, 0.01, 0.01]), np.log([1e-3, most, 1.0]))
    found = least_squares(residuals, start, bounds=bounds, loss="soft_l1", f_scale=0.1)
    rounded = Kernel(*(float(f"{v:.4g}") for v in np.exp(found.x)))
    left = np.abs(errors(rounded, rows.of(rows.held_out)))
    return Kernel(
        rounded.fixed_s,
        rounded.bandwidth_share,
        rounded.compute_share,
        round(float(np.median(left)), 4),
    )


def _kernel(x: Values) -> Kernel:
    fixed_s, bandwidth_share, compute_share = np.exp(x)
    return Kernel(float(fixed_s), float(bandwidth_share), float(compute_share))


def rows_of(kind: str, device: Device, known: Tables) -> Rows:
    """Return the rows of a kind: a format of GEMMs, or a part of `fits.Fit`."""
    found = list(_TIMES[kind](device, known) if kind in _TIMES else ())
    found = found or list(_gemms(kind, device, known) if kind in _GEMMS else ())
    keep = np.random.default_rng(0).permutation(len(found))[:ROWS]
    values = np.array([found[i] for i in np.sort(keep)]).reshape(-1, 4)
    return Rows(*values.T)


Times = Iterator[tuple[float, float, float, float]]  # the fields of Rows


def _points(grid: Any) -> Iterator[tuple[tuple[int, ...], float]]:
    for index in np.argwhere(~np.isnan(grid.seconds)):
        point = tuple(axis[i] for axis, i in zip(grid.axes, index, strict=True))
        yield point, float(grid.seconds[tuple(index)])


def _gemms(fmt: str, device: Device, known: Tables) -> Times:
    stored, peak, cast = _GEMMS[fmt]
    if fmt not in known.gemms or peak not in device.peak_flops:
        return
    width = size_bytes(stored)
    for (m, n, k), seconds in _points(known.gemms[fmt]):
        if min(n, k) < SMALLEST:
            continue
        narrowed = known.quantize(m, k, dynamic=True) if cast else None
        moved = width * (n * k + m * k) + 2 * m * n
        yield (
            2 * m * n * k / device.peak_flops[peak],
            moved / device.bandwidth_bytes_s,
            narrowed.seconds if narrowed else 0.0,
            seconds,
        )


def _casts(name: str) -> Any:
    def times(device: Device, known: Tables) -> Times:
        if name not in known.casts:
            return
        for (rows, columns), seconds in _points(known.casts[name]):
            if columns >= SMALLEST:
                moved = QUANTIZE_BYTES * rows * columns
                yield 0.0, moved / device.bandwidth_bytes_s, 0.0, seconds

    return times


def _context(device: Device, known: Tables) -> Times:
    for (fmt, head_dim, window), section in known.context.items():
        if fmt != "bf16" or window:
            continue
        for (heads, kv_heads), grid in section.grids.items():
            for (batch, tokens), seconds in _points(grid):
                flops = 4 * batch * heads * head_dim * tokens * (tokens + 1) / 2
                moved = 4 * batch * tokens * (heads + kv_heads) * head_dim
                yield (
                    flops / device.peak_flops["bf16"],
                    moved / device.bandwidth_bytes_s,
                    0.0,
                    seconds,
                )


def _generation(device: Device, known: Tables) -> Times:
    for (fmt, head_dim, window), section in known.generation.items():
        if fmt != "bf16" or window:
            continue
        for (heads, kv_heads), grid in section.grids.items():
            for (batch, context), seconds in _points(grid):
                flops = 4 * batch * heads * head_dim * context
                moved = 4 * batch * context * kv_heads * head_dim
                yield (
                    flops / device.peak_flops["bf16"],
                    moved / device.bandwidth_bytes_s,
                    0.0,
                    seconds,
                )


_TIMES = {
    "stream": _casts("static"),
    "scaled": _casts("dynamic"),
    "context": _context,
    "generation": _generation,
}
KINDS = (*_GEMMS, *_TIMES)
MOST = {"stream": CACHED, "scaled": CACHED}


def gathered(kind: str, found: Sequence[tuple[Device, Tables]]) -> Rows:
    """Return the rows of a kind, of every device of a family."""
    parts = [rows_of(kind, device, known) for device, known in found]
    return Rows(
        *(np.concatenate([getattr(p, name) for p in parts]) for name in Rows.__slots__)
    )


def families() -> dict[str, list[tuple[Device, Tables]]]:
    """Return the devices that have tables, by compute capability."""
    found: dict[str, list[tuple[Device, Tables]]] = {}
    for device in DEVICES.values():
        known = tables(device.id)
        if known is not None and device.compute_capability:
            found.setdefault(device.compute_capability, []).append((device, known))
    return found


def document() -> dict[str, Any]:
    """Return what `data/fits.json` holds: a fit of every family that has tables."""
    return {
        "_about": __doc__.split("\n")[0],
        "families": {name: _entry(found) for name, found in families().items()},
    }


def _entry(found: Sequence[tuple[Device, Tables]]) -> dict[str, Any]:
    sources = ", ".join(f"{d.id} ({t.engine} {t.version})" for d, t in found)
    kinds = {kind: gathered(kind, found) for kind in KINDS}
    fitted = {
        kind: {
            **asdict(fit_kernel(rows, MOST.get(kind, 1.0))),
            "rows": len(rows.seconds),
        }
        for kind, rows in kinds.items()
        if len(rows.seconds)
    }
    return {
        "origin": f"{found[0][1].origin}: {sources}",
        "gemms": {fmt: fitted[fmt] for fmt in _GEMMS if fmt in fitted},
        **{kind: fitted[kind] for kind in PARTS if kind in fitted},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the document to the file that is named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("optimizer/data/fits.json"))
    out = parser.parse_args(arguments).out
    out.write_text(json.dumps(document(), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
