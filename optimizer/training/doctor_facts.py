"""What a log shows, before anybody says what it means: a few robust figures.

Medians of a tenth of the records stand for the beginning and the end, so that one bad
batch is neither. Example: losses 5, 4, 3, 2, 2, 9, 2 fell from 4 to 2, with one spike.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from optimizer.training.logs import Record, RunLog

GIVES_WAY = 5  # losses that are not finite: fewer may be bad batches
LEAST_RECORDS = 10  # fewer say little
AGAIN = 0.25  # of what was won: a loss that gives back as much has turned
SPIKE_NOISE = 12.0  # times the median step from one loss to the next
SPIKE_SHARE = 0.25  # and of the loss itself

Series = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Losses:
    """The finite losses: where they began, where they ended, how they got there."""

    first: float
    last: float
    best: float  # lowest median of a tenth
    best_step: int
    noise: float  # median |change| from one record to the next
    spikes: tuple[int, ...]  # steps of single losses far above their neighbors

    @property
    def fell(self) -> float:
        """Share of the first loss that is gone at the end; negative: it rose."""
        return (self.first - self.last) / abs(self.first) if self.first else 0.0

    @property
    def rose_again(self) -> bool:
        """Whether the end lies clearly above the best, not counting noise."""
        lost_again = max(AGAIN * (self.first - self.best), 5 * self.noise)
        return self.last - self.best > lost_again


def losses(log: RunLog) -> Losses | None:
    """Return what the finite losses did. None: there are too few."""
    known = [(s, v) for s, v in log.series("loss") if math.isfinite(v)]
    if len(known) < LEAST_RECORDS:
        return None
    values = [v for _, v in known]
    size = max(3, len(values) // 10)
    medians = [
        (statistics.median(values[i : i + size]), known[i + size - 1][0])
        for i in range(len(values) - size + 1)
    ]
    best, at = min(medians)
    noise = statistics.median(abs(b - a) for a, b in pairwise(values))
    return Losses(
        first=medians[0][0],
        last=medians[-1][0],
        best=best,
        best_step=at,
        noise=noise,
        spikes=tuple(_spikes(known, noise)),
    )


def _spikes(known: Series, noise: float) -> list[int]:
    found = []
    for i in range(2, len(known) - 2):
        step, value = known[i]
        around = [known[j][1] for j in (i - 2, i - 1, i + 1, i + 2)]
        middle = statistics.median(around)
        if value - middle > max(SPIKE_NOISE * noise, SPIKE_SHARE * abs(middle)):
            found.append(step)
    return found


def bad_losses(log: RunLog) -> list[int]:
    """Return the steps whose loss is inf or NaN."""
    return [step for step, loss in log.series("loss") if not math.isfinite(loss)]


def stays_bad(log: RunLog) -> bool:
    """Whether hardly any loss is finite after the first that is not."""
    bad = bad_losses(log)
    after = [s for s, _ in log.series("loss") if bad and s >= bad[0]]
    return bool(bad) and len(bad) >= max(3, 0.9 * len(after))


@dataclass(frozen=True, slots=True)
class Scale:
    """What the loss scale did."""

    first: float
    last: float
    lowest: float
    highest: float
    skipped: tuple[int, ...]  # steps that were left out
    steps: int  # of how many
    recent: float  # share left out of the second half

    @property
    def left_out(self) -> float:
        """Share of the steps that were left out."""
        return len(self.skipped) / max(self.steps, 1)


def gives_way(log: RunLog) -> bool:
    """Whether losses of step after step are not finite, and each halves the scale.

    Bad data is left out and forgotten; here every scale is too large, and more so.
    """
    bad, seen = bad_losses(log), scale(log)
    if seen is None or len(bad) < GIVES_WAY:
        return False
    return seen.last <= seen.highest / 2.0 ** (len(bad) - 1)


def scale(log: RunLog) -> Scale | None:
    """Return what the loss scale did. None: the log has none, or it never fell."""
    known = log.series("loss_scale")
    skipped = [r.step for r in log.records if r.skipped]
    if not skipped:
        # Between two records lie as many halvings as the scale fell by.
        skipped = [b[0] for a, b in pairwise(known) for _ in range(_halvings(a, b))]
    if not skipped:
        return None
    values = [v for _, v in known] or [math.nan]
    begin, end = log.records[0].step, log.records[-1].step
    half = begin + (end - begin + 1) / 2
    late = sum(step >= half for step in skipped)
    return Scale(
        first=values[0],
        last=values[-1],
        lowest=min(values),
        highest=max(values),
        skipped=tuple(skipped),
        steps=end - begin + 1,
        recent=late / max(end + 1 - half, 1),
    )


def _halvings(a: tuple[int, float], b: tuple[int, float]) -> int:
    if not (0 < b[1] < a[1]):
        return 0
    return max(1, round(math.log2(a[1] / b[1])))


def norm_growth(log: RunLog) -> float | None:
    """Return the median norm of the last tenth over that of the best fifth.

    None: too few norms. What is not finite is left out.
    """
    values = [v for _, v in log.series("gradient_norm") if math.isfinite(v)]
    if len(values) < LEAST_RECORDS:
        return None
    size = max(3, len(values) // 10)
    usual = statistics.median(values[: max(size, len(values) // 5)])
    return statistics.median(values[-size:]) / usual if usual else math.inf


# Layers, where HealthMonitor wrote the log


def sampled(log: RunLog) -> list[Record]:
    """Return the records that look into layers."""
    return [r for r in log.records if r.layers]


def median_by_layer(log: RunLog, figure: str) -> dict[str, float]:
    """Return the median of a layer's figure over the run, by layer."""
    found: dict[str, list[float]] = {}
    for record in sampled(log):
        for name, layer in record.layers.items():
            value = layer.get(figure)
            if isinstance(value, int | float):
                found.setdefault(name, []).append(float(value))
    return {name: statistics.median(values) for name, values in found.items()}


def median_flushed(log: RunLog) -> dict[str, float]:
    """Return the median share of an FP8 tensor that becomes zero, by layer.tensor."""
    found: dict[str, list[float]] = {}
    for record in sampled(log):
        for name, layer in record.layers.items():
            flushed = layer.get("flushed")
            for tensor, share in (
                flushed.items() if isinstance(flushed, Mapping) else ()
            ):
                found.setdefault(f"{name}.{tensor}", []).append(float(share))
    return {name: statistics.median(values) for name, values in found.items()}


def first_bad_output(log: RunLog) -> tuple[Record, str] | None:
    """Return where outputs were first not finite, and in which layer: the first one.

    Only while the weights are sound: up to the first bad loss, or as long as a scaler
    leaves bad steps out. None: no such output was seen.
    """
    bad = bad_losses(log)
    for record in sampled(log):
        sound = not bad or record.step <= bad[0] or record.skipped
        for name, layer in record.layers.items():
            if sound and layer.get("output_nonfinite"):
                return record, name
    return None


def largest_output(log: RunLog, before: int) -> tuple[str, float] | None:
    """Return the layer with the largest finite output before a step, and that output."""
    amaxes = [
        (float(layer["output_amax"]), name)
        for record in sampled(log)
        if record.step < before
        for name, layer in record.layers.items()
        if isinstance(layer.get("output_amax"), int | float)
    ]
    if not amaxes:
        return None
    largest, name = max(amaxes)
    return name, largest
