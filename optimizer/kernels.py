"""Kernel times that somebody measured, by device and engine.

`tables("h100")` reads what was timed of vLLM's kernels on an H100: GEMMs, attention over
a prompt and over a cache, the pass that narrows activations to FP8, the all-reduce of
tensor parallelism. The figures are `aiconfigurator-core`'s (data/kernels/NOTICE;
`workers/kernel_source.py` says what its names are here). A worker's own measurements
read the same way, through `from_profile`.

What a time covers, by the origin of the shipped tables:

gemm "bf16"         the product alone, of several weights in turn
gemm "fp8"          the same and the pass that narrows its input, whose scale is found on
                    the way: for each token in vLLM, for the tensor in TensorRT-LLM.
                    `quantize`, dynamic less static, is what a known scale saves
gemm "fp8_block"    the same with a scale for 128 inputs and for 128×128 weights
gemm "nvfp4"        four-bit weights and inputs, a scale for 16; vLLM's of one weight, so
                    that a small one may lie in the cache
gemm "int8"         SmoothQuant's eight bits; "int8_wo", "int4_wo": weight-only
context_attention   a prompt's, causal, in one kernel; K and V of `kv_fmt` are stored,
                    the products are in 16 bits
generation_attention  one new token of each sequence against a context that includes it
quantize            bf16 to e4m3, input and output where the kernel before left them
all_reduce          the engine's own, within a node, with CUDA graphs

Head sizes are never mixed: 96 is another kernel than 64 or 128. Fp16 was not timed.
"""

import json
import math
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import numpy as np

from optimizer.attention_times import Section
from optimizer.errors import HardwareError
from optimizer.four_digits import decode
from optimizer.grid import Grid
from optimizer.kernel_tables import (
    Basis as Basis,
    Layout,
    Tables as Tables,
    Timing as Timing,
)
from optimizer.profile_rows import ROW_KINDS, tables_of_rows


@cache
def tables(device_id: str, engine: str = "vllm") -> Tables | None:
    """Return what is known of an engine on a device of the catalogue, its newest version.

    None: nothing. The file is read once, at the first call.
    """
    path = files("optimizer").joinpath(f"data/kernels/{device_id}.{engine}.npz")
    if not path.is_file():
        return None
    with path.open("rb") as file, np.load(file) as archive:
        return _unpack(archive)


ENGINES = MappingProxyType({"vllm": "vllm", "tensorrt_llm": "trtllm"})
"""What the tables call an engine that a request may name. Of others nothing was timed."""


def of_engine(device_id: str, engine: str) -> Tables | None:
    """Return the tables of the engine that a request names; of vLLM where it has none."""
    own = tables(device_id, ENGINES.get(engine, "vllm"))
    return own or tables(device_id)


def stand_in(known: Tables, engine: str) -> bool:
    """Whether the engine that a request names is another than that of the tables."""
    return engine != "any" and ENGINES.get(engine) != known.engine


def _unpack(archive: Mapping[str, Any]) -> Tables:
    header = json.loads(archive["header.json"])
    gemms: dict[str, Grid] = {}
    casts: dict[str, Grid] = {}
    reductions: dict[int, Grid] = {}
    attention: dict[str, dict[Layout, Section]] = {"context": {}, "generation": {}}
    for entry in header["arrays"]:
        seconds = decode(archive[entry["name"]])
        axes = [tuple(axis) for axis in entry["axes"]]
        # Found when the file was made: finding them takes longer than reading it.
        errors = [math.nan if e is None else e for e in entry["errors"]]
        known = Grid(tuple(axes), seconds, None, tuple(errors))
        match entry["op"]:
            case "gemm":
                gemms[entry["fmt"]] = known
            case "quantize":
                casts[entry["fmt"]] = known
            case "all_reduce":
                reductions[entry["gpus"]] = known
            case op:
                pairs = [(h, kv) for h, kv in entry["pairs"]]
                layout = (entry["fmt"], entry["head_dim"], entry["window"])
                attention[op][layout] = Section.of(pairs, axes, seconds, None, errors)
    return Tables(
        device=header["device"],
        engine=header["engine"],
        version=header["engine_version"],
        basis=Basis.KERNELS,
        origin=header["origin"],
        facts=header["facts"],
        gemms=gemms,
        context=attention["context"],
        generation=attention["generation"],
        casts=casts,
        reductions=reductions,
    )


def from_profile(profile: Mapping[str, Any]) -> Tables:
    """Return the tables of what a worker measured on its own device.

    The profile is JSON, whose lists may be missing or empty:

        {"schema": 1, "device": "h100", "engine": "vllm", "engine_version": "0.24.0",
         "driver": "…", "versions": {…}, "measured_at": "2026-12-01T12:00:00Z",
         "gemm": [{"fmt": "bf16", "m": 1, "n": 4096, "k": 4096,
                   "seconds": 1.5e-5, "spread": 0.02}],
         "context_attention": [{"kv_fmt": "bf16", "batch": 1, "tokens": 512, "heads": 32,
                                "kv_heads": 8, "head_dim": 128, "window": null, …}],
         "generation_attention": [{…, "context": 512, …}],
         "quantize": [{"rows": 1, "columns": 4096, "dynamic": false, …}],
         "all_reduce": [{"gpus": 2, "bytes": 8192, …}]}

    `spread` is that of the repeats over their median; it is the error of a reading at the
    point. Of rows that say the same the last counts. What else the profile says is kept
    as facts. Raises HardwareError for another schema, for a row that lacks a field, and
    for a time that is not above zero.
    """
    if profile.get("schema") != 1:
        raise HardwareError(f"a profile of schema {profile.get('schema')!r}, not 1")
    try:
        return Tables(
            device=profile["device"],
            engine=profile["engine"],
            version=profile["engine_version"],
            basis=Basis.MEASURED,
            origin=f"measured at {profile['measured_at']}",
            facts={k: v for k, v in profile.items() if k not in ROW_KINDS},
            **tables_of_rows(profile),
        )
    except KeyError as missing:
        raise HardwareError(f"a profile without {missing}") from missing
