"""The training stack: what every product of every matrix runs in, and why."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from optimizer.advice import KEPT_FP32
from optimizer.sites import LINEAR_PARTS
from optimizer.stack import Component
from optimizer.training.candidates import OPERANDS, Arithmetic, Gemm, format_of
from optimizer.training.drift import layer_of
from optimizer.training.probe import Probed
from optimizer.training.verdict import Result, Tried

HEADS = frozenset({"lm_head", "embed_out"})
FOLLOWS = "follows the fp32 baseline"


def rows(found: Probed, sizes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return a row for every matrix: layer, its three products, and the reason."""
    chosen = found.chosen
    result = found.results.get(chosen.candidate.name) if chosen else None
    return [
        {
            "matrix": matrix,
            "layer": layer_of(matrix),
            "component": _component(matrix),
            **{str(gemm): str(_runs(chosen, matrix, gemm)) for gemm in Gemm},
            "operands": {
                str(gemm): [
                    format_of(_runs(chosen, matrix, gemm), role).name
                    for role in OPERANDS[gemm]
                ]
                for gemm in Gemm
            },
            "reason": _reason(result, matrix),
        }
        for matrix in sizes
    ]


def by_component(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return what each component's matrices run in: "fp8", or "9 × fp8, 1 × bf16".

    A matrix of several arithmetics is named by all three: "fp8/bf16/bf16".
    """
    found: dict[str, Counter[str]] = {}
    for row in rows:
        runs = [row[str(gemm)] for gemm in Gemm]
        name = runs[0] if len(set(runs)) == 1 else "/".join(runs)
        found.setdefault(row["component"], Counter())[name] += 1
    return {
        component: next(iter(counts))
        if len(counts) == 1
        else ", ".join(f"{n} × {name}" for name, n in counts.most_common())
        for component, counts in found.items()
    }


def _component(matrix: str) -> str:
    """Return the component of a matrix; one of no known name is named by itself."""
    plain = re.sub(r"\.(base_layer|lora_[AB])$", "", matrix)
    inside = re.sub(r"^.*?\.\d+\.", "", plain)
    known = LINEAR_PARTS.get(inside)
    if known is None:
        known = Component.LM_HEAD if plain in HEADS else None
    adapter = re.search(r"\.(lora_[AB])$", matrix)
    name = str(known) if known else inside
    return f"{name}.lora" if adapter else name


def _runs(chosen: Tried | None, matrix: str, gemm: Gemm) -> Arithmetic:
    return chosen.candidate.runs(matrix, gemm) if chosen else Arithmetic.FP32


def _reason(result: Result | None, matrix: str) -> str:
    """Say why a matrix runs as it does: from the run before it was promoted."""
    if result is None:
        return "nothing narrower follows the fp32 baseline"
    if all(p.matrix != matrix for p in result.last.candidate.promotions):
        return FOLLOWS
    before = result.rounds[0]
    for finding in before.findings:
        if finding.matrix == matrix:
            return f"promoted: {finding.said}"
    layer = layer_of(matrix)
    for drift in before.drifts:
        if drift.layer == layer and drift.drifts:
            off, moved = drift.gradient_norm.value, drift.moved.value
            return (
                f"promoted: {layer} left the baseline (gradient norm {100 * off:+.2g} %, "
                f"weights moved {100 * moved:+.2g} %); run again it does not"
            )
    return "promoted with the layers that left the baseline"


def kept_fp32(chosen: Tried | None) -> list[dict[str, Any]]:
    """Return what stays in fp32 in any case, with reasons and sources."""
    if chosen is None:
        return []
    return [asdict(reason) for reason in KEPT_FP32]
