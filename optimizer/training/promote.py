"""Which products to run in something wider, so that a run follows the baseline again.

    suspects ▸ run again ▸ drift left? ▸ all of the layers that drift ▸ run again ▸ …

First only products that read an operand that suffers: one that is flushed or clamped,
or else the one that rounding hurts most in a layer that drifts. Each further round
takes more, up to every product of every layer that drifts. What cured a candidate is
known, because the cured one was run.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

from optimizer.training.candidates import (
    OPERANDS,
    WIDER,
    Arithmetic,
    Candidate,
    Gemm,
    Promotion,
)
from optimizer.training.causes import LIMITS, Cause
from optimizer.training.drift import LayerDrift, layer_of
from optimizer.training.exponents import Seen
from optimizer.training.trainer import Figures

ROUNDS = 3
SUFFERS = 0.01  # of an operand's nonzero values flushed or clamped


def promotions(
    candidate: Candidate,
    figures: Figures,
    drifts: Sequence[LayerDrift],
    found: Iterable[Cause],
    round_: int,
) -> list[Promotion]:
    """Return what to promote after a run; nothing where nothing more would help."""
    bad = _bad_layers(drifts, figures)
    named = [f.matrix for f in found if f.breaks and f.matrix]
    if round_ == 0 and named and candidate.arithmetic is not Arithmetic.FP8:
        return _new(candidate, chain(*(_all(candidate, name) for name in named)))
    matrices = [m for m in figures.seen if layer_of(m) in bad]
    if round_ == 0 and candidate.arithmetic is Arithmetic.FP8:
        seen = figures.seen
        sick = chain(*(_suffering(candidate, m, seen[m]) for m in seen))
        noisy = chain(*(_suspects(candidate, m, seen[m]) for m in matrices))
        return _new(candidate, sick) or _new(candidate, noisy)
    if round_ == 1 and named:  # what feeds a value that overflows
        matrices = [m for m in figures.seen if layer_of(m) in map(layer_of, named)]
    return _new(candidate, chain(*(_all(candidate, m) for m in matrices)))


def _bad_layers(drifts: Sequence[LayerDrift], figures: Figures) -> set[str]:
    """Return the layers that drift; for one without matrices, the next that has some.

    Its gradient comes from there.
    """
    having = {layer_of(matrix) for matrix in figures.seen}
    found: set[str] = set()
    for index, one in enumerate(drifts):
        if one.drifts:
            after = (d.layer for d in drifts[index:] if d.layer in having)
            found.update(list(after)[:1])
    return found


def _new(candidate: Candidate, asked: Iterable[Promotion]) -> list[Promotion]:
    """Leave out what is as wide already."""
    return [p for p in asked if candidate.runs(p.matrix, p.gemm) is not p.arithmetic]


def _all(candidate: Candidate, matrix: str) -> list[Promotion]:
    wider = WIDER[candidate.arithmetic]
    return [Promotion(matrix, gemm, wider) for gemm in Gemm]


def _suffering(
    candidate: Candidate, matrix: str, roles: dict[str, Seen]
) -> list[Promotion]:
    """Promote the products that read an operand that suffers."""
    suffers = {role for role, seen in roles.items() if _loss(seen) > SUFFERS}
    if any(_loss(roles[r]) > LIMITS.fp8_flushed for r in suffers & {"weight", "input"}):
        return _all(candidate, matrix)
    wider = WIDER[candidate.arithmetic]
    reading = [gemm for gemm in Gemm if suffers & set(OPERANDS[gemm])]
    return [Promotion(matrix, gemm, wider) for gemm in reading]


def _suspects(
    candidate: Candidate, matrix: str, roles: dict[str, Seen]
) -> list[Promotion]:
    """Promote the products that read the operand which rounding hurts most."""
    operands = {r: s for r, s in roles.items() if _narrow(s)}
    if not operands:
        return []
    noisiest = max(operands, key=lambda role: _noise(operands[role]))
    wider = WIDER[candidate.arithmetic]
    reading = [gemm for gemm in Gemm if noisiest in OPERANDS[gemm]]
    return [Promotion(matrix, gemm, wider) for gemm in reading]


def _narrow(seen: Seen) -> list[str]:
    return [name for name in seen.taken if name.startswith("fp8")]


def _loss(seen: Seen) -> float:
    shares = [seen.underflow_share(n) + seen.overflow_share(n) for n in _narrow(seen)]
    return max(shares, default=0.0)


def _noise(seen: Seen) -> float:
    return max((seen.noise_share(name) for name in _narrow(seen)), default=0.0)
