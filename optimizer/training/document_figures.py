"""What one run came to, as plain JSON: its products, its updates, its exponents."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from optimizer.training import updates
from optimizer.training.candidates import OPERANDS, RESULTS, Gemm
from optimizer.training.drift import layer_of
from optimizer.training.exponents import Seen, SeenBy
from optimizer.training.trainer import Figures
from optimizer.training.updates import STORED

Json = dict[str, Any]


def gemms(seen: SeenBy) -> list[Json]:
    """Return each product of each matrix: what it read and what it made."""
    return _gemms(seen, _shares)


def gemms_with_histograms(seen: SeenBy) -> list[Json]:
    """Return the same with what lies in each tensor, by exponent."""
    return _gemms(
        seen, lambda found: {**_shares(found), "histogram": _histogram(found)}
    )


def _gemms(seen: SeenBy, told: Callable[[Seen], Json]) -> list[Json]:
    return [
        {
            "matrix": matrix,
            "layer": layer_of(matrix),
            "gemm": str(gemm),
            "operands": {r: told(roles[r]) for r in OPERANDS[gemm] if r in roles},
            "result": told(roles[RESULTS[gemm]]) if RESULTS[gemm] in roles else None,
        }
        for matrix, roles in seen.items()
        for gemm in Gemm
        if OPERANDS[gemm][0] in roles
    ]


def _shares(seen: Seen) -> Json:
    """Return the shares of one tensor, in the formats that it was held against.

    `norm` is that of all its values in the steps that were looked into, together; a
    gradient under a loss scale is scaled.
    """
    return {
        "zero_rate": seen.zero_rate,
        "norm": math.sqrt(seen.squares),
        "amax": seen.amax,
        "nonfinite": seen.nonfinite,
        "formats": {
            name: {
                "zero_rate": seen.zero_rate_in(name),
                "underflow": seen.underflow_share(name),
                "overflow": seen.overflow_share(name),
                "noise": seen.noise_share(name),
            }
            for name in seen.taken
        },
    }


def update_rows(figures: Figures) -> Json:
    """Return what steps do to each layer's weights, and how much would round away."""
    layers: dict[str, list[updates.Update]] = {}
    for name, update in figures.updates.items():
        layers.setdefault(layer_of(name), []).append(update)
    return {layer: _update(every) for layer, every in layers.items()}


def _update(every: Sequence[updates.Update]) -> Json:
    """Return the largest ratios of a layer's parameters, and the least in a format's steps.

    Of a parameter whose steps are under half of eps, most round away.
    """
    changed = sum(u.changed for u in every)
    stored = {fmt for u in every for fmt in u.lost}
    least = min(u.mean_step_ratio for u in every)
    return {
        "ratio": _number(max(u.mean_ratio for u in every)),
        "step_ratio": _number(max(u.mean_step_ratio for u in every)),
        "least_in_steps": {
            fmt.name: _number(updates.scaled(least, fmt)) for fmt in STORED
        },
        "rounds_away": {
            fmt: sum(u.lost.get(fmt, 0) for u in every) / max(changed, 1)
            for fmt in sorted(stored)
        },
    }


def norms(figures: Figures) -> Json:
    """Return the mean gradient norm of each layer."""
    squares: dict[str, list[float]] = {}
    for name, norms in figures.norms.items():
        kept = squares.setdefault(layer_of(name), [0.0] * len(norms))
        squares[layer_of(name)] = [a + b * b for a, b in zip(kept, norms, strict=True)]
    return {
        layer: _number(sum(map(math.sqrt, values)) / max(len(values), 1))
        for layer, values in squares.items()
    }


def histograms(baseline: Figures) -> list[Json]:
    """Return what lies in each layer's gradients and inputs in fp32, by exponent."""
    layers: dict[str, dict[str, Seen]] = {}
    for matrix, roles in baseline.seen.items():
        kept = layers.setdefault(layer_of(matrix), {})
        for role in ("input", "gradient", "weight_gradient"):
            if role in roles:
                kept.setdefault(role, Seen()).merge(roles[role])
    return [
        {"layer": layer, "role": role, **_histogram(seen)}
        for layer, roles in layers.items()
        for role, seen in roles.items()
    ]


def _histogram(seen: Seen) -> Json:
    found = seen.to_json()
    return {k: found[k] for k in ("first", "counts", "zeros", "elements", "amax")}


def plain(values: Sequence[float]) -> list[float | None]:
    """Return figures for JSON: null for what is not finite."""
    return [_number(value) for value in values]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None of no values, and where it is not finite."""
    return _number(sum(values) / len(values)) if values else None
