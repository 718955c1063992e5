"""When a training run is not well: thresholds, readings, alarms. Free of torch.

A reading is what one sampled step showed. An alarm rings once, when its metric has been
beyond its threshold for `patience` readings in a row, and may ring again after a
reading within it. `deploy/prometheus/rules.yml` has the same thresholds.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

SCALED = frozenset({"fp16"})  # precisions whose gradients become zero without a scale


class Metric(StrEnum):
    """What is watched; the values are the names that alarms and rules use."""

    ZERO_RATE = "zero_rate"
    SCALE_DRIFT = "scale_drift"
    BF16_UNDERFLOW = "bf16_underflow"
    FP8_OVERFLOW = "fp8_overflow"
    FP8_FLUSHED = "fp8_flushed"
    GRADIENT_NORM = "gradient_norm"
    BACKOFFS = "backoffs"
    UNCHANGED = "unchanged"
    NONFINITE = "nonfinite"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Beyond which values an alarm rings."""

    zero_rate: float = 0.05  # share of a layer's gradient that is 0; in fp16 alone
    scale_drift: float = 0.3  # standard deviation of log2 of an FP8 scale, in binades
    bf16_underflow: float = 0.001  # share of a layer's nonzero gradient
    fp8_overflow: float = 5.0  # values beyond FP8, per second
    fp8_flushed: float = 0.25  # share of an FP8 tensor's nonzero values that become 0
    gradient_norm: float = 10.0  # times the mean of the readings before
    backoffs: float = 0.1  # share of the last `BACKOFF_STEPS` steps that were skipped
    unchanged: float = 0.5  # share of a layer's weights that the update left as is
    patience: int = 2  # readings in a row; what is not finite rings at the first

    def limit(self, metric: Metric) -> float:
        """Return the threshold of a metric; none is allowed to be inf or NaN."""
        return 0.0 if metric is Metric.NONFINITE else float(getattr(self, metric))


BACKOFF_STEPS = 100
DRIFT_READINGS = 128  # readings over which drift is taken; fewer say nothing yet
NORM_MEMORY = 0.9  # weight of the past in the mean gradient norm
NORM_READINGS = 5  # before them the mean says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReading:
    """What one step showed of a layer. None: it was not looked at, or has no such."""

    zero_rate: float | None = None
    bf16_underflow: float | None = None
    gradient_norm: float | None = None
    update_ratio: float | None = None  # lr·‖g‖/‖w‖
    unchanged: float | None = None
    nonfinite: int = 0  # values of the gradient that are inf or NaN
    output_amax: float | None = None  # largest finite |output|
    output_nonfinite: int = 0
    scales: Mapping[str, float] = field(default_factory=dict)  # FP8, by tensor
    overflowed: Mapping[str, int] = field(default_factory=dict)  # values beyond FP8
    flushed: Mapping[str, float] = field(default_factory=dict)  # share that becomes 0

    def to_json(self) -> dict[str, Any]:
        """Return what was looked at; counts of 0 and empty tables are left out."""
        named = ((f.name, getattr(self, f.name)) for f in fields(self))
        kept = ("zero_rate", "bf16_underflow", "unchanged", "output_amax")
        return {
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in named
            if value or (name in kept and value is not None)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one sampled step showed."""

    step: int
    precision: str
    learning_rate: float
    loss_scale: float | None  # None: the loss is not scaled
    gradient_norm: float | None  # unscaled and unclipped, where the loop gave it
    step_s: float  # seconds that a step took, on average since the reading before
    skipped: bool  # the scaler left the step out
    layers: Mapping[str, LayerReading]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One metric went beyond its threshold."""

    metric: Metric
    step: int
    layer: str  # "": the run as a whole
    value: float
    threshold: float

    def __str__(self) -> str:
        where = f" in {self.layer}" if self.layer else ""
        return (
            f"step {self.step}: {self.metric} is {self.value:.3g}{where} "
            f"(threshold {self.threshold:g})"
        )


@dataclass(slots=True)
class Watch:
    """The state behind the alarms: bounded, whatever the length of the run."""

    thresholds: Thresholds = field(default_factory=Thresholds)
    beyond: dict[tuple[Metric, str], int] = field(default_factory=dict)  # in a row
    skips: deque[bool] = field(default_factory=lambda: deque(maxlen=BACKOFF_STEPS))
    scales: dict[str, deque[float]] = field(default_factory=dict)  # log2
    mean_norm: float = 0.0
    norms: int = 0

    def step(self, number: int, skipped: bool) -> list[Alarm]:
        """See one step, sampled or not; return the alarms that ring now."""
        self.skips.append(skipped)
        if not skipped and (Metric.BACKOFFS, "") not in self.beyond:
            return []
        share = sum(self.skips) / BACKOFF_STEPS
        return self._judged(number, [(Metric.BACKOFFS, "", share)], patience=1)

    def read(self, reading: Reading) -> list[Alarm]:
        """See one reading; return the alarms that ring now."""
        shares = list(self._values(reading))
        bad = [v for v in shares if v[0] is Metric.NONFINITE]
        others = [v for v in shares if v[0] is not Metric.NONFINITE]
        alarms = self._judged(reading.step, others, self.thresholds.patience)
        return [*self._judged(reading.step, bad, patience=1), *alarms]

    def _values(self, reading: Reading) -> Iterator[tuple[Metric, str, float]]:
        for name, layer in reading.layers.items():
            yield from _of_layer(name, layer, reading)
            for tensor, scale in layer.scales.items():
                drift = self._drift(f"{name}.{tensor}", scale)
                if drift is not None:
                    yield Metric.SCALE_DRIFT, f"{name}.{tensor}", drift
            for tensor, share in layer.flushed.items():
                yield Metric.FP8_FLUSHED, f"{name}.{tensor}", share
        over = sum(sum(r.overflowed.values()) for r in reading.layers.values())
        if any(r.overflowed for r in reading.layers.values()):
            yield Metric.FP8_OVERFLOW, "", over / max(reading.step_s, 1e-9)
        ratio = self._norm_ratio(reading.gradient_norm)
        if ratio is not None:
            yield Metric.GRADIENT_NORM, "", ratio

    def _drift(self, tensor: str, scale: float) -> float | None:
        past = self.scales.setdefault(tensor, deque(maxlen=DRIFT_READINGS))
        past.append(math.log2(scale) if scale > 0 else 0.0)
        return deviation(past) if len(past) == DRIFT_READINGS else None

    def _norm_ratio(self, norm: float | None) -> float | None:
        """Return the norm over the mean of those before; what is not finite is inf."""
        if norm is None:
            return None
        if not math.isfinite(norm):
            return math.inf
        before = self.mean_norm
        weight = NORM_MEMORY if self.norms else 0.0
        self.mean_norm = weight * before + (1 - weight) * norm
        self.norms += 1
        return norm / before if before and self.norms > NORM_READINGS else None

    def _judged(
        self,
        step: int,
        values: Iterable[tuple[Metric, str, float]],
        patience: int,
    ) -> list[Alarm]:
        alarms = []
        for metric, layer, value in values:
            limit = self.thresholds.limit(metric)
            if not value > limit:
                self.beyond.pop((metric, layer), None)
                continue
            times = self.beyond.get((metric, layer), 0) + 1
            self.beyond[metric, layer] = times
            if times == patience:
                alarm = Alarm(
                    metric=metric, step=step, layer=layer, value=value, threshold=limit
                )
                alarms.append(alarm)
        return alarms

    def state(self) -> dict[str, Any]:
        """Return everything but the thresholds as plain values."""
        return {
            "beyond": [[str(m), layer, n] for (m, layer), n in self.beyond.items()],
            "skips": list(self.skips),
            "scales": {name: list(past) for name, past in self.scales.items()},
            "mean_norm": self.mean_norm,
            "norms": self.norms,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`."""
        self.beyond = {(Metric(m), layer): n for m, layer, n in state["beyond"]}
        self.skips = deque(state["skips"], maxlen=BACKOFF_STEPS)
        self.scales = {
            name: deque(past, maxlen=DRIFT_READINGS)
            for name, past in state["scales"].items()
        }
        self.mean_norm, self.norms = state["mean_norm"], state["norms"]


def _of_layer(
    name: str, layer: LayerReading, reading: Reading
) -> Iterator[tuple[Metric, str, float]]:
    if reading.precision in SCALED and layer.zero_rate is not None:
        yield Metric.ZERO_RATE, name, layer.zero_rate
    if layer.bf16_underflow is not None:
        yield Metric.BF16_UNDERFLOW, name, layer.bf16_underflow
    # A warm-up that begins at 0 changes nothing, and is well.
    if layer.unchanged is not None and reading.learning_rate > 0:
        yield Metric.UNCHANGED, name, layer.unchanged
    if not reading.skipped:  # a scaler looks for the largest scale by overflowing
        yield Metric.NONFINITE, name, float(layer.nonfinite + layer.output_nonfinite)


def deviation(values: Iterable[float]) -> float:
    """Return the standard deviation (of the population, as Prometheus has it)."""
    known = list(values)
    mean = sum(known) / len(known)
    return math.sqrt(sum((v - mean) ** 2 for v in known) / len(known))
