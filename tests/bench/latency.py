"""Modelled seconds beside those of others: `python -m tests.bench.latency`.

    make estimator     # once: aiconfigurator 0.12 in .venv-latency
    python -m tests.bench.latency [--no-peer]

1. Uniform stacks of open models beside aiconfigurator's estimate, which reads the same
   kernel times: what differs is the composition (explained below the table).
2. Whole models that others timed and published, with the ratio of ours to theirs.
3. How far readings between measured points are off: leave-one-out.
4. The roofline beside the tables, on rows that its fit has not seen.
5. What FP8 buys where: Qwen2-7B's sites on an H100, one sequence and 64.

The last line is JSON. Peer's answers are kept in var/bench/latency.
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optimizer.architectures import PUBLISHED
from optimizer.cost import site_cost, stack_cost, steps
from optimizer.fits import PARTS, fit
from optimizer.fitting import errors, families, gathered
from optimizer.hardware import device
from optimizer.kernels import Tables, tables
from optimizer.roofline import least_s
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
from tests.bench._latency_peer import beside_the_peer
from tests.bench._latency_rows import ROWS, TORCHAO, Published
from tests.bench._latency_stacks import SYSTEMS, shape, uniform

FAR = 0.25  # from here on a row gets its likely reason


def _median(values: Sequence[float]) -> float:
    return statistics.median(abs(v) for v in values)


# 2. What others published


@dataclass(frozen=True, slots=True)
class Beside:
    """A published row, our figure for it and the physical limit."""

    row: Published
    ours: float
    limit: float  # what no device of this kind can beat

    @property
    def ratio(self) -> float:
        return self.ours / self.row.value


def beside(row: Published) -> Beside:
    model = shape(row.model)
    stack = uniform(model, row.formats)
    workload = Workload(row.batch, row.prompt, row.output, row.gpus, row.cuda_graphs)
    found = stack_cost(model, stack, device(row.device), workload)
    first, each = _limits(model, stack, row, workload)
    return Beside(
        row,
        _measure(row, found.first_token_s, found.per_token_s),
        _measure(row, first, each),
    )


def _measure(row: Published, first_token_s: float, per_token_s: float) -> float:
    if row.measure != "tokens_per_s":
        return first_token_s if row.measure == "first_token_s" else per_token_s
    whole = first_token_s + (row.output - 1) * per_token_s
    return row.batch * row.output / whole


def _limits(
    model: ModelShape, stack: Stack, row: Published, workload: Workload
) -> tuple[float, float]:
    """Return the least seconds to the first token and per token: bytes and products."""
    where = device(row.device)
    prefill, decode = steps(workload)

    def least(shape: SiteShape, index: int) -> float:
        step = prefill if index == 0 else decode[len(decode) // 2]
        return least_s(shape, stack.choices[shape.site], where, step) / row.gpus

    return tuple(math.fsum(least(s, i) for s in model.sites) for i in (0, 1))  # type: ignore[return-value]


def beside_published() -> dict[str, float]:
    print("\n2. Published: theirs, ours, ours / theirs, what the device could at most")
    found = [beside(row) for row in ROWS]
    for one in found:
        row = one.row
        scale, unit = (1.0, "tok/s") if row.measure == "tokens_per_s" else (1e3, "ms")
        name = f"{row.model:13}{row.device:6}{row.formats:12}{row.gpus:2} GPU"
        size = f"{row.batch:4} × {row.prompt:5} + {row.output:5}"
        print(
            f"{name} {size} {row.value * scale:9.1f}{one.ours * scale:9.1f} "
            f"{one.ratio:6.2f} {one.limit * scale:9.1f} {unit}"
        )
        rate = row.measure == "tokens_per_s"
        assert (one.ours <= one.limit) if rate else (one.ours >= one.limit), row
        if abs(one.ratio - 1) > FAR:
            print(f"{'':14}likely: {row.likely}")
    for source in dict.fromkeys(row.source for row in ROWS):
        print(f"   {source}")
    # Of a rate above 1 is faster, of seconds below 1: how much faster ours is.
    faster = [
        b.ratio if b.row.measure == "tokens_per_s" else 1 / b.ratio for b in found
    ]
    torch = [f for f, b in zip(faster, found, strict=True) if b.row.source == TORCHAO]
    return {
        "published_rows": float(len(found)),
        "published_median_speed_ratio": round(statistics.median(faster), 3),
        "published_within_25_percent_share": round(
            sum(abs(b.ratio - 1) <= FAR for b in found) / len(found), 3
        ),
        "published_torchao_median_speed_ratio": round(statistics.median(torch), 3),
    }


# 3. Interpolation


def left_out() -> dict[str, float]:
    print("\n3. Leave-one-out of the tables, median |error|")
    medians: list[float] = []
    for id_ in SYSTEMS:
        known = tables(id_)
        assert known is not None
        cells = []
        for op, fmt in _read(known):
            found = known.leave_one_out(op, fmt)
            if found.size:
                medians.append(float(np.median(np.abs(found))))
                cells.append(f"{op} {fmt} {medians[-1]:.1%}")
        print(f"{id_:6} {known.engine} {known.version}: {'; '.join(cells)}")
    return {
        "leave_one_out_median_error": round(statistics.median(medians), 4),
        "leave_one_out_largest_median_error": round(max(medians), 4),
    }


def _read(known: Tables) -> list[tuple[str, str]]:
    attention = ("context_attention", "generation_attention")
    return [
        *(("gemm", f) for f in known.gemms),
        *((op, f) for op in attention for f in ("bf16", "fp8")),
        *(("quantize", f) for f in known.casts),
    ]


# 4. Roofline


def roofline_beside_tables() -> dict[str, float]:
    print(
        "\n4. Roofline beside the tables, rows that the fit has not seen: median |error|"
    )
    every = []
    figures = {}
    for name, found in families().items():
        reached = fit(found[0][0])
        cells = []
        for kind in (*reached.gemms, *PARTS):
            rows = gathered(kind, found)
            if not rows.seconds.size:
                continue
            kernel = (
                reached.gemms[kind] if kind in reached.gemms else getattr(reached, kind)
            )
            off = np.abs(errors(kernel, rows.of(rows.held_out)))
            every.append(off)
            cells.append(f"{kind} {np.median(off):.1%}")
        print(f"{name:5} {', '.join(cells)}")
        products = np.concatenate(every[-len(cells) :])
        figures[f"roofline_{name}_median_error"] = round(float(np.median(products)), 4)
    figures["weight_only_median_error"], bias = weight_only()
    print(
        "FP8 weights under 16-bit inputs on an A100, beside int8 weights in TensorRT-LLM: "
        f"{figures['weight_only_median_error']:.1%}, of it {bias:+.1%} to one side"
    )
    overall = float(np.median(np.concatenate(every)))
    return {"roofline_median_error": round(overall, 4), **figures}


def weight_only() -> tuple[float, float]:
    """Return median |error| and median error of weight-only FP8, which vLLM's tables lack.

    Int8 weights have the same bytes and are widened as well; TensorRT-LLM 1.0's were
    timed on an A100. Matrices as large as models' have them.
    """
    known, where = tables("a100", "trtllm"), device("a100")
    assert known is not None
    grid = known.gemms["int8_wo"]
    model = PUBLISHED["llama-2-7b"].shape  # any: a matrix knows nothing of it
    choice = choice_named(Component.FFN_IN, "fp8_e4m3_weight_only")
    off = []
    for index in np.argwhere(~np.isnan(grid.seconds)):
        m, n, k = (axis[i] for axis, i in zip(grid.axes, index, strict=True))
        if min(n, k) >= 1024 and max(n, k) <= 40_000:
            site = SiteShape(Site(0, Component.FFN_IN), n, k, n * k)
            ours = site_cost(site, choice, where, Workload(m, 1, 0), model)
            off.append(ours.per_token_s / float(grid.seconds[tuple(index)]) - 1)
    return round(_median(off), 4), statistics.median(off)


# 5. What FP8 buys


def what_fp8_buys() -> dict[str, float]:
    model, where = PUBLISHED["qwen2-7b"].shape, device("h100")
    print(
        "\n5. Qwen2-7B on an H100: µs of a decode step in bf16, FP8 and with FP8 weights"
    )
    figures = {}
    for batch in (1, 64):
        workload = Workload(batch, 512, 128)
        for site in model.sites:
            component = site.site.component
            if component not in LINEAR or site.site.layer > 0:
                continue
            found = [
                site_cost(site, choice_named(component, name), where, workload, model)
                for name in ("bf16", "fp8_e4m3_token", "fp8_e4m3_weight_only")
            ]
            us = [c.per_token_s * 1e6 for c in found]
            cells = " ".join(
                f"{t:8.1f} {c.basis:8}" for t, c in zip(us, found, strict=True)
            )
            print(
                f"batch {batch:3} {component:10} {cells} saved {1 - us[1] / us[0]:6.1%}"
            )
            figures[f"qwen2_7b_batch_{batch}_{component}_fp8_saved_share"] = round(
                1 - us[1] / us[0], 3
            )
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--no-peer", action="store_true", help="leave out table 1")
    asked = parser.parse_args(arguments)
    figures = {} if asked.no_peer else beside_the_peer()
    figures |= beside_published() | left_out() | roofline_beside_tables()
    figures |= what_fp8_buys()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
