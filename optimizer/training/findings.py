"""What the doctor can find, as values."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """What a run looks like."""

    BACKOFF_LOOP = "backoff_loop"
    FROZEN_WEIGHTS = "frozen_weights"
    GRADIENT_UNDERFLOW = "gradient_underflow"
    LAYER_OVERFLOW = "layer_overflow"
    FP8_OUTLIER = "fp8_outlier"
    LEARNING_RATE = "learning_rate"
    BAD_DATA = "bad_data"
    NOTHING_WRONG = "nothing_wrong"


class Sure(StrEnum):
    """How sure a finding is, the surest first."""

    CERTAIN = "certain"  # the log shows the cause itself
    LIKELY = "likely"  # it shows what only this cause is known to do
    POSSIBLE = "possible"  # something else would look the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    verdict: Verdict
    sure: Sure
    said: str  # in a sentence
    evidence: tuple[str, ...]  # each with its steps and figures
    first: str  # what to do first
    steps: tuple[int, ...] = ()  # where to look: a few steps at most
    layers: tuple[str, ...] = ()  # the worst first, a few at most

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return asdict(self) | {"verdict": str(self.verdict), "sure": str(self.sure)}
