"""When a step is unstable, and what follows from it: rules over explicit state.

A step is unstable if its loss or its gradient norm is not finite, if the loss lies more
than `loss_deviation` mean deviations above its running mean, or if the norm is more
than `gradient_ratio` times its own. The steps after it run in the wider precision until
`calm_steps` in a row were calm, by thresholds half as wide: that is the hysteresis.
Each unstable step is a strike, each `calm_steps` calm ones take a strike back, and
`run_steps` strikes make the switch persistent.

A step that a gradient scaler left out is how it finds its scale. It is unstable only
where the step before was left out as well, and not while the run warms up.

Example, with run_steps 3: calm, spike, spike, spike -> low, high, high, high for good.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from optimizer.errors import SpecError

CALMER = 0.5  # of a threshold, in a step that counts as calm
LEAST_DEVIATION = 0.01  # of the mean loss: a loss that hardly moves is no yardstick


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How much unrest is borne, and for how long."""

    low: str = "fp16"
    high: str = "bf16"
    loss_deviation: float = 6.0  # mean absolute deviations above the mean
    gradient_ratio: float = 10.0  # times the mean norm
    calm_steps: int = 20  # in a row, before the low precision comes back
    run_steps: int = 5  # strikes that make the switch persistent
    warmup_steps: int = 50  # in which only a loss that is not finite is unstable
    memory: float = 0.98  # weight of the past in the running means

    def __post_init__(self) -> None:
        for name in ("loss_deviation", "gradient_ratio"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 1):
                raise SpecError(f"{name} is {value:g}; it must be a number over 1")
        for name in ("calm_steps", "run_steps"):
            if getattr(self, name) < 1:
                raise SpecError(
                    f"{name} is {getattr(self, name)}; it must be 1 or more"
                )
        if not 0 <= self.memory < 1:
            raise SpecError(f"memory is {self.memory:g}; it must be 0 or more, under 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stability:
    """What is remembered of the steps so far: a few numbers."""

    steps: int = 0
    mean_loss: float = 0.0
    deviation: float = 0.0  # mean absolute
    mean_norm: float = 0.0
    strikes: int = 0
    calm: int = 0  # steps in a row
    high: bool = False
    persistent: bool = False
    skipped: bool = False  # the last step was left out

    def precision(self, policy: Policy) -> str:
        """Return what the next step runs in."""
        return policy.high if self.high else policy.low


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step came to. None: the loop did not say."""

    loss: float | None
    gradient_norm: float | None = None
    skipped: bool = False


def step(state: Stability, policy: Policy, outcome: Outcome) -> Stability:
    """Return the state after one step."""
    unstable = _unrest(state, policy, outcome) > 1
    calm = _unrest(state, policy, outcome) <= CALMER
    after = replace(
        _remembered(state, policy, outcome),
        steps=state.steps + 1,
        skipped=outcome.skipped,
        calm=state.calm + 1 if calm else 0,
    )
    if unstable:
        strikes = state.strikes + 1
        lasting = state.persistent or strikes >= policy.run_steps
        return replace(after, strikes=strikes, high=True, persistent=lasting)
    if after.calm < policy.calm_steps:
        return after
    return replace(
        after, calm=0, strikes=max(after.strikes - 1, 0), high=after.persistent
    )


def _unrest(state: Stability, policy: Policy, outcome: Outcome) -> float:
    """Return how unstable a step was: over 1 is unstable, inf where not finite."""
    loss, norm = outcome.loss, outcome.gradient_norm
    if loss is not None and not math.isfinite(loss):
        return math.inf
    if state.steps < policy.warmup_steps:
        return 0.0
    if outcome.skipped:
        return math.inf if state.skipped else 0.0
    if norm is not None and not math.isfinite(norm):
        return math.inf
    most = 0.0
    if loss is not None and state.deviation:
        over = (loss - state.mean_loss) / _yardstick(state)
        most = over / policy.loss_deviation
    if norm is not None and state.mean_norm:
        most = max(most, norm / state.mean_norm / policy.gradient_ratio)
    return most


def _yardstick(state: Stability) -> float:
    return max(state.deviation, LEAST_DEVIATION * abs(state.mean_loss))


def _remembered(state: Stability, policy: Policy, outcome: Outcome) -> Stability:
    """Move the running means; a spike moves them no further than its threshold.

    While the run warms up the means forget faster, as a mean of so few values does.
    """
    if outcome.skipped:
        return state
    loss, norm = outcome.loss, outcome.gradient_norm
    weight = min(policy.memory, state.steps / (state.steps + 1))
    if loss is not None and math.isfinite(loss):
        if state.deviation and state.steps >= policy.warmup_steps:
            top = state.mean_loss + policy.loss_deviation * _yardstick(state)
            loss = min(loss, top)
        off = abs(loss - state.mean_loss) if state.steps else 0.0
        state = replace(
            state,
            mean_loss=weight * state.mean_loss + (1 - weight) * loss,
            deviation=weight * state.deviation + (1 - weight) * off,
        )
    if norm is not None and math.isfinite(norm):
        if state.mean_norm and state.steps >= policy.warmup_steps:
            norm = min(norm, policy.gradient_ratio * state.mean_norm)
        mean = weight * state.mean_norm + (1 - weight) * norm
        state = replace(state, mean_norm=mean)
    return state


def to_json(state: Stability) -> dict[str, Any]:
    """Return plain values; `Stability(**...)` reads them back."""
    return asdict(state)
