"""What `aiconfigurator-core` timed, as arrays on grids, in our names and in seconds.

its name                    ours
gemm_dtype bfloat16, sq     bf16, int8; the others keep their names
kv_cache_dtype bfloat16     bf16; products in 16 bits (attn_dtype fp8 is left out)
generation's step           context = step + 1: the new token is counted
scale_matrix                quantize "static": the scale is known
compute_scale               what finding the scale adds: "dynamic" is the sum of both
all-reduce's message_size   elements of 2 bytes; ours is bytes; with CUDA graphs

Rows that beat the device's peak or its memory are dropped and counted: such a time was
of data that lay in a cache, as a model's weights do not.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimizer.hardware import Device

Columns = Mapping[str, NDArray[Any]]

# Our name, bytes of a weight with its scales, format whose peak bounds the product.
GEMMS = {
    "bfloat16": ("bf16", 2.0, "bf16"),
    "fp8": ("fp8", 1.0, "fp8"),
    "fp8_block": ("fp8_block", 1.0, "fp8"),
    "nvfp4": ("nvfp4", 9 / 16, "fp4_e2m1"),
    "sq": ("int8", 1.0, "int8"),
    "int8_wo": ("int8_wo", 1.0, "bf16"),
    "int4_wo": ("int4_wo", 0.5, "bf16"),
}
# vLLM's block GEMMs were timed from Python, without CUDA graphs (the package's collector
# says so): 59 µs where TensorRT-LLM's take 12 (1×4096×4096, H100). That is not what an
# engine that replays graphs waits for.
LEFT_OUT = {("vllm", "fp8_block")}
CACHES = {"bfloat16": ("bf16", 2), "fp8": ("fp8", 1)}  # our name, bytes


@dataclass(frozen=True, slots=True)
class Array:
    """Times on a grid, and what they are of."""

    facts: dict[str, Any]
    axes: list[list[int]]
    seconds: NDArray[np.float64]
    dropped: int  # rows that beat the device


@dataclass(slots=True)
class Source:
    """The files of one system and engine."""

    root: Path
    system: str
    engine: str
    device: Device
    read: Callable[[Path], Columns]
    versions: dict[str, str] = field(default_factory=dict)

    def columns(self, kind: str, name: str, newest: bool = False) -> Columns | None:
        """Return a table, of the engine's version or of the newest that there is."""
        folder = self.root / "systems/data" / self.system / kind / self.engine
        found = sorted(folder.glob(f"*/{name}_perf.parquet"), key=_age)
        wanted = self.versions.get("gemm")
        if wanted and not newest:
            found = [p for p in found if p.parent.name == wanted]
        if not found:
            return None
        self.versions[name] = found[-1].parent.name
        return self.read(found[-1])


def arrays(source: Source) -> Iterator[Array]:
    """Return every array that we keep of a system and engine."""
    yield from _gemms(source)
    yield from _attention(source, "context", "isl", 0)
    yield from _attention(source, "generation", "step", 1)
    yield from _casts(source)
    yield from _reductions(source)


def _gemms(source: Source) -> Iterator[Array]:
    table = source.columns("gemm", "gemm")
    if table is None:
        return
    for name, (fmt, weight, peak) in GEMMS.items():
        rows = table["gemm_dtype"] == name
        if not rows.any() or (source.engine, fmt) in LEFT_OUT:
            continue
        m, n, k = (table[c][rows] for c in "mnk")
        moved = weight * n * k + 2.0 * m * (n + k)  # 16 bits in and out
        limit = _limit_s(source.device, 2.0 * m * n * k, moved, peak)
        seconds = table["latency"][rows] / 1e3
        yield _array({"op": "gemm", "fmt": fmt}, [m, n, k], seconds, limit)


def _attention(source: Source, op: str, length: str, new: int) -> Iterator[Array]:
    table = source.columns("attention", f"{op}_attention")
    if table is None:
        return
    windows = table.get("window_size", np.zeros_like(table["head_dim"]))
    bf16 = table["attn_dtype"] == "bfloat16"
    layouts = product(CACHES, np.unique(table["head_dim"]), np.unique(windows))
    for cache, head_dim, window in layouts:
        rows = (
            bf16
            & (table["kv_cache_dtype"] == cache)
            & (table["head_dim"] == head_dim)
            & (windows == window)
        )
        if not rows.any():
            continue
        fmt, size = CACHES[cache]
        heads, kv_heads, batch = (
            table[c][rows] for c in ("num_heads", "num_key_value_heads", "batch_size")
        )
        tokens = table[length][rows] + new
        pairs, index = np.unique(
            np.stack([heads, kv_heads], axis=1), axis=0, return_inverse=True
        )
        flops, moved = _attention_work(
            op, size, batch, tokens, heads, kv_heads, int(head_dim), int(window)
        )
        limit = _limit_s(source.device, flops, moved, "bf16")
        facts = {
            "op": op,
            "fmt": fmt,
            "head_dim": int(head_dim),
            "window": int(window),
            "pairs": pairs.tolist(),
        }
        seconds = table["latency"][rows] / 1e3
        found = _array(facts, [index, batch, tokens], seconds, limit)
        yield Array(facts, found.axes[1:], found.seconds, found.dropped)


def _attention_work(
    op: str,
    size: int,
    batch: NDArray[Any],
    tokens: NDArray[Any],
    heads: NDArray[Any],
    kv_heads: NDArray[Any],
    head_dim: int,
    window: int,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the products' FLOPs and the bytes of K and V, Q and the output."""
    seen = np.minimum(tokens, window) if window else tokens
    queries = tokens if op == "context" else 1
    pairs = seen * (seen + 1) / 2 + (tokens - seen) * seen if op == "context" else seen
    flops = 4.0 * batch * heads * head_dim * pairs
    keys = tokens if op == "context" else seen
    return flops, batch * head_dim * 2.0 * (
        size * keys * kv_heads + 2 * queries * heads
    )


def _casts(source: Source) -> Iterator[Array]:
    known = source.columns("quantize", "scale_matrix")
    extra = source.columns("quantize", "computescale")
    if known is None or extra is None:
        return
    paired = list(zip(known["m"], known["k"], known["latency"], strict=True))
    static = {(m, k): t / 1e3 for m, k, t in paired}
    shapes = list(zip(extra["m"], extra["k"], strict=True))
    rows = [i for i, shape in enumerate(shapes) if shape in static]
    m, k = extra["m"][rows], extra["k"][rows]
    first = np.array([static[shapes[i]] for i in rows])
    for fmt, seconds in (
        ("static", first),
        ("dynamic", first + extra["latency"][rows] / 1e3),
    ):
        limit = np.zeros(len(rows))  # its input was just written: it lies in the cache
        yield _array({"op": "quantize", "fmt": fmt}, [m, k], seconds, limit)


def _reductions(source: Source) -> Iterator[Array]:
    table = source.columns("comm", "custom_allreduce", newest=True)
    if table is None:
        return
    graphs = np.char.find(table["kernel_source"].astype(str), "eager") < 0
    for gpus in np.unique(table["num_gpus"]):
        rows = (table["num_gpus"] == gpus) & graphs
        size = table["message_size"][rows] * 2
        facts = {"op": "all_reduce", "gpus": int(gpus)}
        seconds = table["latency"][rows] / 1e3
        yield _array(facts, [size], seconds, np.zeros(len(size)))


def _limit_s(
    device: Device, flops: NDArray[Any], moved: NDArray[Any], peak: str
) -> NDArray[np.float64]:
    """Return the shortest time that the data sheet allows."""
    rate = device.peak_flops.get(peak, np.inf)
    return np.maximum(flops / rate, moved / device.bandwidth_bytes_s)


def _array(
    facts: dict[str, Any],
    coordinates: list[NDArray[Any]],
    seconds: NDArray[np.float64],
    limit: NDArray[np.float64],
) -> Array:
    """Return the times on the grid of all coordinates: the mean of repeated rows."""
    axes = [np.unique(c) for c in coordinates]
    kept = seconds >= limit
    where = tuple(
        np.searchsorted(a, c[kept]) for a, c in zip(axes, coordinates, strict=True)
    )
    shape = [len(a) for a in axes]
    total, count = np.zeros(shape), np.zeros(shape)
    np.add.at(total, where, seconds[kept])
    np.add.at(count, where, 1)
    mean = np.divide(total, count, out=np.full(shape, np.nan), where=count > 0)
    return Array(facts, [a.tolist() for a in axes], mean, int((~kept).sum()))


def _age(path: Path) -> tuple[tuple[int, ...], str]:
    """Order versions by their numbers: 0.9.0 is older than 0.14.0."""
    name = path.parent.name
    numbers = "".join(c if c.isdigit() else " " for c in name).split()
    return tuple(int(n) for n in numbers), name
