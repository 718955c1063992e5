"""`make gpu-check`: the GPU at hand, held against the emulation and the cost model.

Prints one row for each matrix of Qwen2-7B at several numbers of tokens, and writes the
times as a profile (`kernels.from_profile`). A GPU with FP8 units takes a few minutes.
Without one it says so in a line and leaves with 77, as a test that was skipped does;
make says "Error 77" and leaves with 2, so `python -m tests.gpu.check` is for programs.

FP8 is the whole layer: the pass that finds a scale for each token, and the product.
Errors are of the first 4096 outputs, ‖y - y64‖ / ‖y64‖ against float64 products of the
same bf16 numbers; "emulated" is the FP8 layer's distance from our emulation of it.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from optimizer import device_state, profile, scaled_mm
from optimizer.architectures import architecture
from optimizer.calibrate import amaxes, calibrate
from optimizer.cost import site_cost
from optimizer.errors import HardwareError
from optimizer.execute import WeightCodes, multiply_codes, round_operand
from optimizer.formats import BF16, FORMATS
from optimizer.hardware import LOCAL, Device, device as catalogued
from optimizer.on_device import (
    Kernels,
    ScaledMm,
    TransformerEngine,
    compare,
    executed_on,
    graph_seconds,
)
from optimizer.profile import Bench, timed
from optimizer.profile_cases import Case, cases
from optimizer.quantize import round_to_format
from optimizer.spec import Workload
from optimizer.stack import (
    LINEAR,
    Component,
    ModelShape,
    Site,
    SiteShape,
    Stack,
    choice_named,
)
from tests.optimizer import tiny

SKIPPED = 77
OUTPUTS = 4096  # that are compared: the rest is more of the same
GRAPH_COPIES = 8  # calls in one graph
BY_ROW = choice_named(Component.FFN_IN, "fp8_e4m3_token")
WIDE = choice_named(Component.FFN_IN, "bf16")


@dataclass(frozen=True, slots=True)
class Row:
    """One product: m × k by k × n. Seconds; NaN where it was not measured."""

    m: int
    n: int
    k: int
    bf16_s: float
    fp8_s: float
    bf16_graph_s: float
    fp8_graph_s: float
    modelled_bf16_s: float
    modelled_fp8_s: float
    bf16_error: float
    fp8_error: float
    emulated_error: float
    spreads: tuple[float, float]  # of the times without graphs


def rows(model: ModelShape, work: Workload, bench: Bench, target: Device) -> list[Row]:
    """Time every matrix of a model in bf16 and in FP8, and compute it in float64."""
    pairs: dict[tuple[int, int, int], dict[str, Case]] = {}
    for case in cases(model, work, ("bf16", "fp8")):
        if case.kind == "gemm":
            size = (case.row["m"], case.row["n"], case.row["k"])
            pairs.setdefault(size, {})[case.format] = case
    return [_row(size, some, bench, target) for size, some in sorted(pairs.items())]


def _row(
    size: tuple[int, int, int], by_format: dict[str, Case], bench: Bench, target: Device
) -> Row:
    wide, narrow = (timed(by_format[f], bench) for f in ("bf16", "fp8"))
    graphs = [_graph_s(by_format[f], bench) for f in ("bf16", "fp8")]
    modelled = [_modelled_s(size, choice, target) for choice in (WIDE, BY_ROW)]
    return Row(
        *size,
        wide[0],
        narrow[0],
        *graphs,
        *modelled,
        *errors(*size, bench.where),
        spreads=(wide[1], narrow[1]),
    )


def _graph_s(case: Case, bench: Bench) -> float:
    if bench.where.type != "cuda":
        return math.nan
    return graph_seconds([case.make(bench.where) for _ in range(GRAPH_COPIES)])


def _modelled_s(size: tuple[int, int, int], choice: Any, target: Device) -> float:
    """Return what the cost model says of one matrix in a decode step of m sequences."""
    m, n, k = size
    shape = SiteShape(Site(0, Component.FFN_IN), n, k, n * k, parts=(n,))
    model = ModelShape("one matrix", 1, k, n, 0, n * k, 2 * n * k, False, (shape,))
    try:
        return site_cost(shape, choice, target, Workload(m, 1, 1), model).per_token_s
    except HardwareError:
        return math.nan


@torch.inference_mode()
def errors(m: int, n: int, k: int, where: torch.device) -> tuple[float, float, float]:
    """Return the errors of bf16 and of FP8 against float64, and of FP8 from ours."""
    generator = torch.Generator().manual_seed(m + n + k)
    x = round_to_format(torch.randn(m, k, generator=generator), BF16)
    weight = torch.randn(min(n, OUTPUTS), k, generator=generator)
    weight = round_to_format(weight * k**-0.5, BF16)
    there_x, there_w = x.to(where), weight.to(where)
    exact = (there_x.double() @ there_w.double().T).cpu()
    wide = functional.linear(there_x.bfloat16(), there_w.bfloat16()).cpu()
    assert BY_ROW.weight is not None
    codes = round_operand(weight, BY_ROW.weight, None)
    narrow = scaled_mm.padded_mm(
        scaled_mm.narrowed(there_x, BY_ROW.input, None),
        scaled_mm.packed(codes, FORMATS[BY_ROW.weight.format]).to(where),
    ).cpu()
    ours = multiply_codes(round_operand(x, BY_ROW.input, None), codes, BY_ROW)
    emulated = round_to_format(ours, BF16)
    return _off(wide, exact), _off(narrow, exact), _off(narrow, emulated.double())


def _off(y: Tensor, wanted: Tensor) -> float:
    return float((y.double() - wanted).norm() / wanted.norm())


COLUMNS = (
    *("m", "n", "k", "bf16 µs", "FP8 µs", "ratio"),
    *("bf16 µs, graph", "FP8 µs, graph", "ratio, graph"),
    *("modelled bf16 µs", "modelled FP8 µs", "modelled ratio"),
    *("bf16 error", "FP8 error", "emulated"),
)


def table(every: Sequence[Row]) -> list[str]:
    """Return the lines of the table. A ratio above 1: FP8 is faster."""
    lines = [COLUMNS]
    for r in every:
        times = [(r.bf16_s, r.fp8_s), (r.bf16_graph_s, r.fp8_graph_s)]
        times.append((r.modelled_bf16_s, r.modelled_fp8_s))
        cells = [str(r.m), str(r.n), str(r.k)]
        for wide, narrow in times:
            cells += [_cell(1e6 * wide, 4), _cell(1e6 * narrow, 4)]
            cells.append(_cell(wide / narrow, 3))
        cells += [_cell(e, 2) for e in (r.bf16_error, r.fp8_error, r.emulated_error)]
        lines.append(tuple(cells))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True))
        for line in lines
    ]


def _cell(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}g}"


def as_profile(every: Sequence[Row], target: Device, now: datetime) -> dict[str, Any]:
    """Return the times as a profile, with graphs where there were any."""

    def gemm(r: Row, fmt: str, eager_s: float, graph_s: float, spread: float) -> Any:
        seconds = eager_s if math.isnan(graph_s) else graph_s
        size = {"fmt": fmt, "m": r.m, "n": r.n, "k": r.k}
        return {**size, "seconds": seconds, "spread": spread}

    products = []
    for r in every:
        products.append(gemm(r, "bf16", r.bf16_s, r.bf16_graph_s, r.spreads[0]))
        products.append(gemm(r, "fp8", r.fp8_s, r.fp8_graph_s, r.spreads[1]))
    return {
        "schema": profile.SCHEMA,
        "device": target.id,
        "engine": profile.ENGINE,
        "engine_version": str(torch.__version__),
        "measured_at": now.isoformat(timespec="seconds"),
        **device_state.facts(),
        "executed_on": executed_on(),
        "graphs": not any(math.isnan(r.fp8_graph_s) for r in every),
        "gemm": products,
    }


def sites(kernels: Kernels, weights: WeightCodes, model: Any, found: Any) -> list[str]:
    """Run a small model's matrices on the device and emulated; return lines."""
    lines = []
    for name in ("fp8_e4m3", "fp8_e4m3_token", "fp8_e5m2", "fp8_e4m3_block"):
        stack = Stack(
            {
                s: choice_named(s.component, name)
                for s in model.sites
                if s.component in LINEAR
            }
        )
        try:
            some = compare(model, tiny.ids(12), stack, found, weights, kernels)
        except (RuntimeError, ValueError, AssertionError) as error:
            lines.append(f"{kernels.name}, {name}: {error}")
            continue
        if some:
            worst = max(some, key=lambda c: c.relative)
            lines.append(
                f"{kernels.name}, {name}: {len(some)} matrices beside their emulation; "
                f"{worst.part} is farthest, by {worst.relative:.2g}"
            )
    return lines


def run(
    model: ModelShape, work: Workload, bench: Bench, target: Device, out: Path
) -> None:
    """Print everything, and write the profile."""
    every = rows(model, work, bench, target)
    print("\n".join(table(every)))
    out.parent.mkdir(parents=True, exist_ok=True)
    made = as_profile(every, target, datetime.now(UTC))
    out.write_text(json.dumps(made, indent=1))
    print(f"profile of {target.id}: {out}")
    small = tiny.loaded("Qwen2ForCausalLM")
    found, weights = amaxes(calibrate(small, [tiny.ids(12)])), WeightCodes(small)
    kernels: list[Kernels] = [ScaledMm(found, weights, bench.where)]
    engine = _transformer_engine()
    if engine is not None:
        kernels.append(TransformerEngine(found, weights, bench.where, engine))
    for some in kernels:
        print("\n".join(sites(some, weights, small, found)))
    if engine is None:
        print("Transformer Engine: its kernels are not installed, nothing was compared")


def _transformer_engine() -> Any:
    if not torch.cuda.is_available():
        return None
    try:
        import transformer_engine.pytorch as engine
    except (ImportError, FileNotFoundError):  # its Python part alone
        return None
    return engine


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.check",
        description=__doc__.split("\n")[0],
        epilog=f"Exit code {SKIPPED}: no GPU with FP8 units here, nothing was measured; "
        "1: the catalogue does not know the device.",
    )
    parser.add_argument("--device", default="", help="its id in the catalogue")
    parser.add_argument(
        "--out", type=Path, default=Path("var/gpu-check.json"), help="of the profile"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, 1 for a GPU that the catalogue does not know, 77 without FP8 units."""
    asked = _asked(arguments)
    if not torch.cuda.is_available():
        print("gpu-check: no CUDA device here, nothing was measured")
        return SKIPPED
    bench = profile.bench()
    name = device_state.name()
    if "fp8" not in bench.formats:
        print(f"gpu-check: {name} has no FP8 units, nothing was measured")
        return SKIPPED
    own = asked.device or device_state.catalogue_id(name)
    if own == LOCAL:
        print(f"gpu-check: the catalogue does not know {name!r}: name it (--device)")
        return 1
    try:
        target = catalogued(own)
    except HardwareError as error:
        print(f"gpu-check: {error}")
        return 1
    known = architecture("qwen2-7b")
    assert known is not None
    run(known.shape, Workload(1, 512, 128), bench, target, asked.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
