"""What came of each candidate, and which one to train in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from optimizer.training.candidates import FASTEST_FIRST, Arithmetic, Candidate, Gemm
from optimizer.training.causes import Cause
from optimizer.training.drift import CONFIDENCE, SAMPLES, Deviation, LayerDrift
from optimizer.training.reasons import Reason
from optimizer.training.trainer import Figures

MOST_PROMOTED = 0.5  # share of the products' work; beyond it FP8 is not worth its setup


class Status(StrEnum):
    """What came of a candidate."""

    SAFE = "safe"  # follows the fp32 baseline
    CURED = "cured"  # does so with some products promoted, which was run
    DRIFTS = "drifts"
    FAILS = "fails"  # cannot be trained in


class Outcome(StrEnum):
    """What came of a probe."""

    RECOMMENDED = "recommended"  # a narrower precision trains as fp32 does
    WITH_PROMOTIONS = "recommended_with_promotions"
    NO_IMPROVEMENT = "no_improvement"  # fp32 alone
    UNSTABLE = "unstable"  # fp32 itself does not train


@dataclass(frozen=True, slots=True)
class Tried:
    """One run of a candidate beside the baseline."""

    candidate: Candidate
    figures: Figures
    drifts: Sequence[LayerDrift]
    loss: Deviation  # of the held-out loss
    findings: Sequence[Cause]
    reasons: Mapping[str, Reason] = field(default_factory=dict)  # of layers that drift

    @property
    def follows(self) -> bool:
        """Whether nothing drifts, and nothing breaks."""
        broken = any(f.breaks for f in self.findings)
        drifting = any(d.drifts for d in self.drifts) or self.loss.drifts
        return not (broken or drifting or self.figures.stopped)


@dataclass(slots=True)
class Result:
    """A candidate's rounds: as it is, and with more and more promoted."""

    rounds: list[Tried] = field(default_factory=list)
    unusable: str | None = None  # why the device does not run it

    @property
    def last(self) -> Tried:
        """The run with all promotions."""
        return self.rounds[-1]

    @property
    def status(self) -> Status:
        """What came of it."""
        if self.last.follows:
            return Status.SAFE if len(self.rounds) == 1 else Status.CURED
        broken = any(f.breaks for f in self.rounds[0].findings)
        return Status.FAILS if broken else Status.DRIFTS


def promoted_share(candidate: Candidate, sizes: Mapping[str, int]) -> float:
    """Return the share of the products' work that promotions take out of a format."""
    total = sum(sizes.values()) * len(Gemm)
    return sum(sizes.get(p.matrix, 0) for p in candidate.promotions) / max(total, 1)


def held_out_loss(
    baseline: Figures, again: Figures, candidate: Figures, seed: int
) -> Deviation:
    """Return how far the held-out loss is off, with a bootstrap over the samples."""
    base, other, mine = (np.asarray(f.held_out) for f in (baseline, again, candidate))
    if not len(base) or len(mine) != len(base) or not np.isfinite(mine).all():
        off = float("inf") if len(base) else 0.0
        return Deviation(off, off, off, 0.0)
    floor = abs(float(other.mean() / base.mean()) - 1)
    value = float(mine.mean() / base.mean()) - 1
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(base), size=(SAMPLES, len(base)))
    ratios = mine[drawn].mean(1) / base[drawn].mean(1) - 1
    edge = (1 - CONFIDENCE) / 2
    low, high = (float(q) for q in np.quantile(ratios, [edge, 1 - edge]))
    return Deviation(value, low, high, floor)


def choose(results: Mapping[str, Result], sizes: Mapping[str, int]) -> Tried | None:
    """Return the fastest candidate that follows the baseline; None: fp32 alone does."""
    order = {name: rank for rank, name in enumerate(FASTEST_FIRST)}
    sound = [
        r.last
        for r in results.values()
        if r.rounds
        and r.unusable is None
        and r.last.follows
        and r.last.candidate.masters
        and r.last.candidate.name in order
        and promoted_share(r.last.candidate, sizes) <= MOST_PROMOTED
    ]
    return min(sound, key=lambda t: order[t.candidate.name], default=None)


def outcome(chosen: Tried | None) -> Outcome:
    """Return what came of the probe, where the baseline trains."""
    if chosen is None or chosen.candidate.arithmetic is Arithmetic.FP32:
        return Outcome.NO_IMPROVEMENT
    promoted = bool(chosen.candidate.promotions)
    return Outcome.WITH_PROMOTIONS if promoted else Outcome.RECOMMENDED


def to_json(tried: Tried) -> dict[str, Any]:
    """Return what one run came to, without its curves."""
    return {
        "promotions": [p.to_json() for p in tried.candidate.promotions],
        "follows": tried.follows,
        "stopped": tried.figures.stopped,
        "held_out_loss": tried.loss.to_json(),
        "drift": [_drift(d, tried.reasons.get(d.layer)) for d in tried.drifts],
        "findings": [f.to_json() for f in tried.findings],
    }


def _drift(found: LayerDrift, why: Reason | None) -> dict[str, Any]:
    return {**found.to_json(), "why": why.to_json() if why else None}
