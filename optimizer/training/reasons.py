"""Why a layer drifts: the first known cause that figures show, or that none does.

    its updates, gradients or FP8 operands are lost ▸ another layer's are ▸
    the run ended ▸ rounding ▸ none known

Rounding shows in the first step, which both runs take from the same weights on the same
samples: whatever a layer's gradient is off by there, the arithmetic alone did. What is
within 1 % there and leaves later is not explained by any figure of the layer: many small
differences went through the optimizer, and the steps added them up.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from optimizer.training import updates
from optimizer.training.candidates import OPERANDS, RESULTS, Candidate, Gemm
from optimizer.training.drift import SAFE, LayerDrift, Values, layer_of, norms_by_layer
from optimizer.training.exponents import Seen
from optimizer.training.trainer import Figures

LOST = (
    0.01  # of a layer's updates, gradients or operands: less explains no drift of 1 %
)
HEAVY = 0.1  # and less explains neither what other layers do nor the end of a run
GRADIENTS = ("gradient", "weight_gradient")
NARROW = "fp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why one layer drifts; `code` is "none_known" where no figure of it says so."""

    code: str
    said: str
    matrix: str | None = None
    gemms: tuple[Gemm, ...] = ()  # the products that read, or make, what is lost
    evidence: dict[str, float] = field(default_factory=dict)  # figures by name

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {**asdict(self), "gemms": [str(gemm) for gemm in self.gemms]}


@dataclass(frozen=True, slots=True)
class _Case:
    """One layer of a candidate's run beside the baseline's."""

    layer: str
    candidate: Candidate
    figures: Figures
    baseline: Figures
    off: Sequence[float]  # the norm of its gradient, from fp32's, step by step

    def tensors(self, roles: Sequence[str]) -> Iterator[tuple[str, str, Seen]]:
        """Yield (matrix, role, what was seen) of the layer's matrices."""
        for matrix, seen in self.figures.seen.items():
            if layer_of(matrix) == self.layer:
                yield from ((matrix, r, seen[r]) for r in roles if r in seen)


def reasons(
    candidate: Candidate,
    figures: Figures,
    baseline: Figures,
    drifts: Sequence[LayerDrift],
) -> dict[str, Reason]:
    """Return why each layer that drifts does, by its name."""
    mine, base = (norms_by_layer(f.norms) for f in (figures, baseline))
    cases = [
        _Case(
            d.layer,
            candidate,
            figures,
            baseline,
            _off(mine.get(d.layer), base[d.layer]),
        )
        for d in drifts
    ]
    found = {case.layer: reason for case in cases if (reason := _largest(case))}
    heavy = {n: r for n, r in found.items() if r.evidence["share"] > HEAVY}
    own = found if figures.stopped is None else heavy
    worst = max(
        heavy.values(), key=lambda reason: reason.evidence["share"], default=None
    )
    drifting = [case for case, d in zip(cases, drifts, strict=True) if d.drifts]
    return {
        case.layer: own.get(case.layer)
        or (_handed_on(worst) if worst else None)
        or _ended(case)
        or _rounding(case)
        or _none_known(case)
        for case in drifting
    }


def _largest(case: "_Case") -> Reason | None:
    """Return what loses most of the layer."""
    found = [reason for ask in _LOSSES if (reason := ask(case))]
    return max(found, key=lambda reason: reason.evidence["share"], default=None)


def _off(mine: Values | None, base: Values) -> list[float]:
    """Return how far norms are from the baseline's, at the steps that both runs have."""
    if mine is None:
        return []
    pairs = zip(mine.tolist(), base.tolist(), strict=False)
    return [m / b - 1 if b else math.inf if m else 0.0 for m, b in pairs]


def _ended(case: _Case) -> Reason | None:
    if case.figures.stopped is None:
        return None
    step = len(case.figures.losses)
    return Reason(
        code="ended",
        said=f"the run ends at step {step}: {case.figures.stopped}",
        evidence={"step": float(step)},
    )


def _updates_lost(case: _Case) -> Reason | None:
    """Of weights without masters: updates that round away."""
    if case.candidate.masters:
        return None
    fmt = case.candidate.storage
    mine = {n: u for n, u in case.figures.updates.items() if layer_of(n) == case.layer}
    share = updates.total(mine, fmt.name)
    if share <= LOST:
        return None
    return Reason(
        code="updates_lost",
        said=f"{_percent(share)} of the updates of {case.layer} round away in {fmt.name}, "
        f"whose steps are {fmt.eps:.2g} of a weight",
        evidence={"share": share},
    )


def _gradients_lost(case: _Case) -> Reason | None:
    """Gradients that are zero and are not in fp32."""
    rows = [
        (_zero_rate(seen) - _base_rate(case, matrix, role), matrix, role)
        for matrix, role, seen in case.tensors(GRADIENTS)
    ]
    share, matrix, role = max(rows, default=(0.0, "", ""))
    if share <= LOST:
        return None
    return Reason(
        code="gradients_lost",
        said=f"{_percent(share)} of the {_name(role)} of {matrix} become zero",
        matrix=matrix,
        gemms=_touching(role),
        evidence={"share": share},
    )


def _operands_lost(case: _Case) -> Reason | None:
    """Operands in FP8 that are flushed to zero, or clamped."""
    rows = [
        (seen.underflow_share(name) + seen.overflow_share(name), matrix, role)
        for matrix, role, seen in case.tensors(("input", "weight", "gradient"))
        for name in seen.taken
        if name.startswith(NARROW)
    ]
    share, matrix, role = max(rows, default=(0.0, "", ""))
    if share <= LOST:
        return None
    return Reason(
        code="operands_lost",
        said=f"{_percent(share)} of the {_name(role)} of {matrix} are flushed or clamped "
        "in FP8",
        matrix=matrix,
        gemms=_touching(role),
        evidence={"share": share},
    )


def _rounding(case: _Case) -> Reason | None:
    """A first step that is off already: weights and samples are the same there."""
    off = case.off
    if not off or abs(off[0]) <= SAFE:
        return None
    where, noise = _noisiest(case)
    matrix, role = where or (None, None)
    most = f"; the {_name(role)} of {matrix} is rounded most" if matrix and role else ""
    return Reason(
        code="rounding",
        said=f"its gradient is off by {_percent(off[0])} at the first step, where weights "
        f"and samples are those of fp32: rounding to {case.candidate.arithmetic} alone "
        f"does it{most}",
        matrix=matrix,
        gemms=_touching(role) if role else (),
        evidence={"first_step": off[0], "noise": noise},
    )


def _none_known(case: _Case) -> Reason:
    off = case.off
    if not off:
        return Reason(
            code="none_known", said="no step of it can be held against fp32's"
        )
    later = [n for n, value in enumerate(off) if not abs(value) <= SAFE]
    when = (
        f"leaves 1 % at step {later[0]}" if later else "stays within 1 % at every step"
    )
    return Reason(
        code="none_known",
        said="none of the known causes: no share of its updates, gradients or operands "
        f"over {_percent(LOST)} is lost; its gradient is off by {_percent(off[0])} at the "
        f"first step and {when}. Small differences that the steps added up",
        evidence={"first_step": off[0], "last_step": off[-1]}
        | ({"step": float(later[0])} if later else {}),
    )


_LOSSES = (_updates_lost, _gradients_lost, _operands_lost)


def _handed_on(worst: Reason) -> Reason:
    """Of a layer that loses nothing itself, in a network where another one does."""
    return replace(
        worst,
        code="handed_on",
        said=f"nothing of its own is lost; elsewhere {worst.said}, and what comes from "
        "there, forth and back, is off",
    )


def _noisiest(case: _Case) -> tuple[tuple[str, str] | None, float]:
    """Return the operand with the largest share of rounding noise, and that share."""
    rows = [
        (seen.noise_share(name), (matrix, role))
        for matrix, role, seen in case.tensors(("input", "weight", "gradient"))
        for name in seen.taken
    ]
    noise, where = max(rows, default=(0.0, None))
    return where, noise


def _touching(role: str) -> tuple[Gemm, ...]:
    """Return the products that read a tensor; of a result the one that makes it."""
    reading = tuple(gemm for gemm in Gemm if role in OPERANDS[gemm])
    return reading or tuple(gemm for gemm in Gemm if RESULTS[gemm] == role)


def _zero_rate(seen: Seen) -> float:
    return max(seen.zero_rate, *(seen.zero_rate_in(name) for name in seen.taken), 0.0)


def _base_rate(case: _Case, matrix: str, role: str) -> float:
    roles: Mapping[str, Seen] = case.baseline.seen.get(matrix, {})
    return roles[role].zero_rate if role in roles else 0.0


def _name(role: str) -> str:
    return role.replace("_", " ")


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
