"""What is wrong with a run, or will be: named causes, with the figures that show them.

The names are those that the doctor uses after a run failed. A finding that `breaks` is
why a candidate cannot be used as it is; another one is worth knowing.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from statistics import fmean, stdev
from typing import Any

from optimizer.formats import FP16
from optimizer.training import updates
from optimizer.training.candidates import Arithmetic, Candidate, Gemm, format_of
from optimizer.training.drift import layer_of
from optimizer.training.exponents import Seen, SeenBy
from optimizer.training.health import Thresholds
from optimizer.training.trainer import Figures

LIMITS = Thresholds()
SURE = 3.0  # standard errors
RISES = 1.05  # a loss that ends so much above its start has not been trained
HEADROOM = 8.0  # times: fp32 values this near fp16's end are worth knowing
TOO_NEAR = 2.0  # times: and these are no place to start a long run from
FORWARD = ("input", "output")
GRADIENTS = ("gradient", "weight_gradient")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What is wrong; `code` is a `findings.Verdict`, or one of a probe's own."""

    code: str
    said: str
    first: str  # what to do first
    breaks: bool
    matrix: str | None = None
    gemm: Gemm | None = None
    evidence: dict[str, float] = field(default_factory=dict)  # figures by name

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        gemm = None if self.gemm is None else str(self.gemm)
        return {**asdict(self), "gemm": gemm}


def of_baseline(figures: Figures, again: Figures) -> list[Cause]:
    """Return what is wrong in fp32 already: then no precision is to blame.

    `again` is the run on the data in another order: where the loss rises in one alone,
    it had the hard samples last.
    """
    if figures.stopped is not None:
        said = f"in fp32, too: {figures.stopped}"
        if figures.losses and figures.losses[-1] > RISES * figures.losses[0]:
            return [_rate(figures, said)]
        step = float(len(figures.losses))
        return [
            Cause(
                code="bad_data",
                said=f"{said}; no precision is to blame",
                first="look at the samples of that step, and at what the network makes "
                "of them",
                breaks=True,
                evidence={"step": step},
            )
        ]
    rises = [_rise(run.losses) for run in (figures, again)]
    if not all(rises) or rises[0] is None:
        return []
    early, late = rises[0]
    return [_rate(figures, f"the loss rises from {early:.3g} to {late:.3g} in fp32")]


def _rise(losses: list[float]) -> tuple[float, float] | None:
    """Return the mean loss of the first and of the last third, where it rises.

    By more than the losses scatter: of small batches some are hard and some are easy.
    The scatter is that of the first third, as a loss that diverges scatters itself.
    """
    if not losses:
        return None
    third = max(len(losses) // 3, 1)
    early, late = fmean(losses[:third]), fmean(losses[-third:])
    scatter = stdev(losses[:third]) if third > 1 else 0.0
    chance = SURE * scatter * math.sqrt(2 / third)
    return (early, late) if late > max(RISES * early, early + chance) else None


def _rate(figures: Figures, said: str) -> Cause:
    return Cause(
        code="learning_rate",
        said=said,
        first="lower the learning rate, or warm it up longer, before any precision",
        breaks=True,
        evidence={"first_loss": figures.losses[0], "last_loss": figures.losses[-1]},
    )


def of_candidate(
    candidate: Candidate, figures: Figures, baseline: Figures
) -> list[Cause]:
    """Return what is wrong with a run, the gravest first."""
    found = [
        *_overflow(candidate, figures, baseline),
        *_back_offs(candidate, figures),
        *_frozen(candidate, figures, baseline),
        *_vanished(candidate, figures, baseline),
        *_flushed(candidate, figures),
        *_clamped(candidate, figures),
        *_near_the_end(candidate, baseline),
    ]
    if figures.stopped is not None and not any(f.breaks for f in found):
        found.append(_stopped(candidate, figures.stopped))
    first: dict[str, Cause] = {}
    for one in found:
        first.setdefault(one.code, one)
    return sorted(first.values(), key=lambda f: not f.breaks)


def _stopped(candidate: Candidate, why: str) -> Cause:
    masters = "" if candidate.masters else "keep fp32 master weights, or "
    return Cause(
        code="diverged",
        said=f"{why}, and fp32 goes on",
        first=f"{masters}train in something wider",
        breaks=True,
    )


def _overflow(
    candidate: Candidate, figures: Figures, baseline: Figures
) -> Iterator[Cause]:
    """Find the first matrix of which a value on the way forward is inf or NaN."""
    if any(_nonfinite(figures.seen, matrix, "weight") for matrix in figures.seen):
        return  # what comes out of broken weights says nothing
    for matrix, roles in figures.seen.items():
        for role in FORWARD:
            seen = roles.get(role)
            if seen is None or not seen.nonfinite:
                continue
            if _nonfinite(baseline.seen, matrix, role):
                continue  # bad in fp32 already
            amax = _amax(baseline.seen, matrix, role)
            ends = format_of(candidate.base, role).max
            yield Cause(
                code="layer_overflow",
                said=f"the {role} of {matrix} has values beyond {candidate.base}: in "
                f"fp32 they reach {amax:.3g}, and {candidate.base} ends at {ends:.4g}",
                first="train in bf16, or run this matrix and what feeds it in fp32",
                breaks=True,
                matrix=matrix,
                gemm=Gemm.FPROP,
                evidence={"fp32_amax": amax, "format_max": ends},
            )
            return


def _nonfinite(seen: SeenBy, matrix: str, role: str) -> bool:
    found = seen.get(matrix, {}).get(role)
    return found is not None and bool(found.nonfinite)


def _amax(seen: SeenBy, matrix: str, role: str) -> float:
    found = seen.get(matrix, {}).get(role)
    return 0.0 if found is None else found.amax


def _near_the_end(candidate: Candidate, baseline: Figures) -> Iterator[Cause]:
    """Warn where fp32's values come near the end of fp16."""
    if candidate.base is not Arithmetic.FP16:
        return
    near = [
        (seen.amax, matrix, role)
        for matrix, roles in baseline.seen.items()
        for role, seen in roles.items()
        if role in FORWARD and FP16.max / HEADROOM < seen.amax
        if candidate.runs(matrix, Gemm.FPROP) is Arithmetic.FP16
    ]
    if near:
        amax, matrix, role = max(near)
        breaks = amax > FP16.max / TOO_NEAR
        away = "train in bf16, or run this matrix and what feeds it in fp32"
        yield Cause(
            code="layer_overflow" if breaks else "near_overflow",
            said=f"the {role} of {matrix} reaches {amax:.3g} in fp32; fp16 ends at 65504",
            first=away
            if breaks
            else f"watch how it grows in the run; if it does, {away}",
            breaks=breaks,
            matrix=matrix,
            gemm=Gemm.FPROP,
            evidence={"fp32_amax": amax, "format_max": FP16.max},
        )


def _back_offs(candidate: Candidate, figures: Figures) -> Iterator[Cause]:
    scaling = candidate.loss_scaling
    if scaling is None or not figures.skipped:
        return
    tries = len(figures.losses) + len(figures.skipped)
    share = len(figures.skipped) / tries
    stuck = figures.stopped is not None
    late = [s for s, _ in figures.skipped if s >= 1]
    again = len(late) / max(tries, 1) > LIMITS.backoffs
    if not (stuck or again):
        return
    held = max(figures.scales, default=0.0)
    yield Cause(
        code="backoff_loop",
        said=f"{len(figures.skipped)} of {tries} tries overflow: the loss scale starts "
        f"at {scaling.initial:.4g} and grows after {scaling.growth_interval} clean "
        f"steps; the largest that held is {held:.4g}",
        first=f"start at {min(held or 1.0, 2.0**16):g} and grow after 2000 clean steps",
        breaks=True,
        evidence={"share": share, "largest_scale": held},
    )


def _frozen(
    candidate: Candidate, figures: Figures, baseline: Figures
) -> Iterator[Cause]:
    """Find updates that round away, in the run, or as fp32's would."""
    if candidate.masters:
        return
    fmt = candidate.storage.name
    share = updates.total(baseline.updates, fmt)
    if figures.updates:
        share = max(share, updates.total(figures.updates, fmt))
    if share <= LIMITS.unchanged:
        return
    ratios = sorted(u.mean_step_ratio for u in baseline.updates.values())
    usual = ratios[len(ratios) // 2]
    yield Cause(
        code="frozen_weights",
        said=f"{100 * share:.3g} % of the updates round away: a step moves weights by "
        f"{usual:.2g} of their size, and {fmt} keeps changes over "
        f"{candidate.storage.eps / 2:.2g}",
        first="keep fp32 master weights",
        breaks=True,
        evidence={"share": share, "step_ratio": usual, "eps": candidate.storage.eps},
    )


def _vanished(
    candidate: Candidate, figures: Figures, baseline: Figures
) -> Iterator[Cause]:
    """Find the matrix that loses most of its gradient to zero."""
    rows = [
        (_zeros(seen) - _zero_rate(baseline.seen, matrix, role), matrix, role)
        for matrix, roles in figures.seen.items()
        for role, seen in roles.items()
        if role in GRADIENTS
    ]
    worst = max(rows, default=(0.0, "", ""))
    if worst[0] <= LIMITS.zero_rate:
        return
    share, matrix, role = worst
    scaled = candidate.loss_scaling is not None
    first = "scale the loss"
    if scaled:
        first = (
            "nothing while the loss falls as in fp32; else start from a larger scale"
        )
    yield Cause(
        code="gradient_underflow",
        said=f"{100 * share:.3g} % of the {role.replace('_', ' ')} of {matrix} are zero "
        f"that are not in fp32{'' if scaled else '; the loss is not scaled'}",
        first=f"{first}, or train in bf16",
        breaks=not scaled and candidate.base is Arithmetic.FP16,
        matrix=matrix,
        gemm=Gemm.DGRAD if role == "gradient" else Gemm.WGRAD,
        evidence={"share": share},
    )


def _zeros(seen: Seen) -> float:
    """Return the zero rate as the product reads it: in FP8, after rounding."""
    return max(seen.zero_rate, *(seen.zero_rate_in(name) for name in seen.taken))


def _zero_rate(seen: SeenBy, matrix: str, role: str) -> float:
    found = seen.get(matrix, {}).get(role)
    return 0.0 if found is None else found.zero_rate


def _flushed(candidate: Candidate, figures: Figures) -> Iterator[Cause]:
    """Find an operand in FP8 most of which one large value pushes under the format."""
    if candidate.arithmetic is not Arithmetic.FP8:
        return
    rows = [
        (seen.underflow_share(name), matrix, role, seen)
        for matrix, roles in figures.seen.items()
        for role, seen in roles.items()
        for name in seen.taken
        if name.startswith("fp8") and role in ("input", "weight", "gradient")
    ]
    if not rows:
        return
    share, matrix, role, seen = max(rows, key=lambda row: row[0])
    if share <= LIMITS.fp8_flushed:
        return
    usual = math.sqrt(seen.squares / max(seen.elements, 1))
    yield Cause(
        code="fp8_outlier",
        said=f"{100 * share:.3g} % of the {role} of {matrix} become zero in FP8: its "
        f"largest value, {seen.amax:.3g}, sets the scale of all others (root mean "
        f"square {usual:.3g})",
        first="run this matrix in bf16, or scale by rows or blocks",
        breaks=True,
        matrix=matrix,
        gemm=Gemm.DGRAD if role == "gradient" else Gemm.FPROP,
        evidence={"share": share, "amax": seen.amax, "rms": usual},
    )


def _clamped(candidate: Candidate, figures: Figures) -> Iterator[Cause]:
    """Find an operand that outgrew its delayed scale."""
    rows = [
        (seen.overflow_share(name), matrix, role)
        for matrix, roles in figures.seen.items()
        for role, seen in roles.items()
        for name in seen.taken
        if name.startswith("fp8") and not seen.nonfinite
    ]
    share, matrix, role = max(rows, default=(0.0, "", ""))
    if share > LIMITS.bf16_underflow:
        yield Cause(
            code="fp8_clamped",
            said=f"{100 * share:.2g} % of the {role} of {matrix} lie beyond its delayed "
            "scale and are clamped",
            first="scale by the current tensor, or leave a margin",
            breaks=False,
            matrix=matrix,
            gemm=Gemm.DGRAD if role == "gradient" else Gemm.FPROP,
            evidence={"share": share},
        )


def where(found: list[Cause]) -> list[str]:
    """Return the layers that breaking findings name."""
    return [layer_of(f.matrix) for f in found if f.breaks and f.matrix]
