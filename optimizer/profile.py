"""The device at hand, measured over a model's own shapes: a profile, as plain JSON.

Every distinct matrix of the model is timed in each format that the device multiplies,
at the workload's numbers of tokens and some between, and so are attention and the pass
to FP8. Each call works on other memory than the one before, twice as much of it as the
last cache holds, so that nothing is found there by chance. `kernels.from_profile`
reads the result; where it has no row, the model is corrected by `fits`.
"""

import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from optimizer.hardware import Device
from optimizer.local_run import spread
from optimizer.profile_cases import Case, Op, Row, cases
from optimizer.spec import Workload
from optimizer.stack import ModelShape

SCHEMA = 1  # of `kernels.from_profile`
ENGINE = "torch"
SAMPLES = 9  # of which the median counts
LIMIT_S = 0.6  # of one row: it ends after this time and three samples
SAMPLE_S = 1e-3  # a sample is as many calls as take this long
CACHES = 2  # times the last cache: what the copies of a call's operands fill
MAX_COPIES = 256
CACHE_BYTES = 1 << 26  # where the machine does not say: more than most have
FP8_UNITS = frozenset(  # as `hardware` has them
    {(8, 9), (9, 0), (10, 0), (10, 3), (12, 0)}
)

Told = Callable[[float, str], None]
Pair = tuple[float, float]  # seconds, measured and modelled


@dataclass(frozen=True, slots=True)
class Bench:
    """Where operands lie, and how to wait until everything there is done."""

    where: torch.device
    cache_bytes: int
    formats: tuple[str, ...]  # of matrices, as the tables call them
    synchronize: Callable[[], None] = lambda: None


def bench() -> Bench:
    """Return the accelerator of this process, or its processor."""
    if not torch.cuda.is_available():
        return Bench(torch.device("cpu"), cpu_cache(), ("fp32", "bf16", "fp8_wo"))
    properties = torch.cuda.get_device_properties(0)
    narrow = ("fp8",) if (properties.major, properties.minor) in FP8_UNITS else ()
    return Bench(
        torch.device("cuda"),
        int(properties.L2_cache_size),
        ("bf16", *narrow),
        torch.cuda.synchronize,
    )


def cpu_cache(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Return the bytes of the processor's largest cache."""
    units = {"K": 1 << 10, "M": 1 << 20}
    sizes = [p.read_text().strip() for p in root.glob("index*/size")]
    return max((int(s[:-1]) * units[s[-1]] for s in sizes), default=CACHE_BYTES)


def timed(case: Case, bench: Bench) -> tuple[float, float]:
    """Return the median seconds of a call, and the spread from quartile to quartile."""
    copies = math.ceil(CACHES * bench.cache_bytes / case.bytes)
    calls = [case.make(bench.where) for _ in range(min(max(copies, 2), MAX_COPIES))]
    warm_s = _pass_s(calls, bench)
    many = itertools.cycle(calls)
    count = max(1, math.ceil(SAMPLE_S / max(warm_s, 1e-9)))
    samples: list[float] = []
    end = time.perf_counter() + LIMIT_S
    while len(samples) < 3 or (len(samples) < SAMPLES and time.perf_counter() < end):
        samples.append(_pass_s(list(itertools.islice(many, count)), bench))
    return statistics.median(samples), spread(samples)


@torch.inference_mode()
def _pass_s(calls: Sequence[Op], bench: Bench) -> float:
    """Return the mean seconds of some calls, one after the other."""
    bench.synchronize()
    start = time.perf_counter()
    for call in calls:
        call()
    bench.synchronize()
    return (time.perf_counter() - start) / len(calls)


def measure(
    model: ModelShape, workload: Workload, bench: Bench, device: Device, told: Told
) -> dict[str, Any]:
    """Time every case, and return the rows by kind, and what corrects the model."""
    lists: dict[str, list[Row]] = defaultdict(list)
    every = cases(model, workload, bench.formats)
    found: list[tuple[Case, float]] = []
    for number, case in enumerate(every):
        told(number / len(every), case.name)
        seconds, spread = timed(case, bench)
        lists[case.kind].append({**case.row, "seconds": seconds, "spread": spread})
        found.append((case, seconds))
    told(1.0, "")
    return {**lists, "fits": list(_fits(_pairs(found, device)))}


def _pairs(
    found: Sequence[tuple[Case, float]], device: Device
) -> dict[tuple[str, str], list[Pair]]:
    """Return what was measured beside what is modelled, by kind of kernel and format.

    A product in FP8 was timed with the pass that narrows its input, which the model
    counts apart: the pass's own time is taken off.
    """
    passes = {
        (case.row["rows"], case.row["columns"]): seconds
        for case, seconds in found
        if case.kind == "quantize" and case.row["dynamic"]
    }
    pairs: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for case, seconds in found:
        if case.format == "fp8" and case.kind == "gemm":
            pass_s = passes.get((case.row["m"], case.row["k"]), 0.0)
            seconds = max(seconds - pass_s, seconds / 2)  # noise makes no time nothing
        pairs[case.kind, case.format].append((seconds, _modelled_s(case, device)))
    return pairs


def _modelled_s(case: Case, device: Device) -> float:
    fmt = case.format if case.format in device.peak_flops else "bf16"
    peak = device.peak_flops.get(fmt, math.inf)
    return max(case.flops / peak, case.bytes / device.bandwidth_bytes_s)


def _fits(pairs: Mapping[tuple[str, str], Sequence[Pair]]) -> Iterator[Row]:
    """Correct the model by what was measured: seconds = fixed + factor × modelled.

    By kind of kernel and format, least squares in relative error, neither below zero.
    The residual is how far a row is off after the correction, relative, as a median.
    """
    for (kind, fmt), some in pairs.items():
        measured, modelled = np.array(some).T
        columns = np.stack([1.0 / measured, modelled / measured], axis=1)
        (fixed, factor), _ = nnls(columns, np.ones(len(some)))
        off = np.abs(columns @ (fixed, factor) - 1.0)
        yield {
            "kind": kind,
            "fmt": fmt,
            "fixed_s": float(fixed),
            "factor": float(factor),
            "residual": float(np.median(off)),
            "rows": len(some),
        }
