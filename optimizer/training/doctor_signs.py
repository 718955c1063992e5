"""The signs that the doctor knows: each looks for one thing that goes wrong in a run.

In the order in which causes come before effects: where two are as sure, the first is
told first. Thresholds are those of `health.py` where HealthMonitor has them.
"""

import math
from collections.abc import Callable, Mapping

from optimizer.formats import BF16, FP16
from optimizer.training import doctor_facts as facts
from optimizer.training.findings import Finding, Sure, Verdict
from optimizer.training.health import SCALED, Thresholds
from optimizer.training.logs import RunLog

LIMITS = Thresholds()
WIDE = ("fp32", "bf16", "fp8")  # formats of float32's range around the matrices
LOOP = 0.1  # share of the later steps left out: far more than a scale that is found
SETTLED = 0.02  # of the loss: a run that begins and does not move by as much stands
FAST_NORMS = 3.0  # times the usual norm
TINY_NORM = 1e-7  # the smallest subnormal number of fp16 is 6e-8
FEW = 5  # steps and layers that are named

Sign = Callable[[RunLog], Finding | None]


def bad_data(log: RunLog) -> Finding | None:
    """A loss that is NaN out of the blue: for a step where a scaler protects, or on."""
    bad = facts.bad_losses(log)
    if not bad:
        return _spikes(log)
    at, lasting = bad[0], facts.stays_bad(log)
    wide = log.precision in WIDE
    if lasting and not wide and log.precision is not None:
        return None
    if lasting and (_rising_before(log, at) or "loss_scale" in log.columns):
        return None
    if not lasting and not wide and facts.gives_way(log):
        return None
    evidence = [f"the loss of step {at} is not finite"]
    evidence += _steady_before(log, at)
    if wide:
        evidence.append(_room(log, at))
    if lasting:
        sure = Sure.LIKELY if wide else Sure.POSSIBLE
        said = (
            f"From step {at} on the loss is NaN, without a warning: a value that is no "
            "number came in with the data."
        )
    else:
        sure = Sure.LIKELY
        evidence.append(f"{len(bad)} such steps in all, and good ones after each")
        said = "Single steps have a loss that is not finite, and the run goes on well."
    return Finding(
        verdict=Verdict.BAD_DATA,
        sure=sure,
        said=said,
        evidence=tuple(evidence),
        steps=tuple(bad[:FEW]),
        first=f"Look at the batch of step {at} for NaN, inf, empty samples and masks "
        "that leave no token; then go on from the checkpoint before it.",
    )


def _spikes(log: RunLog) -> Finding | None:
    seen = facts.losses(log)
    if seen is None or not seen.spikes or seen.rose_again:
        return None
    listed = ", ".join(str(s) for s in seen.spikes[:FEW])
    return Finding(
        verdict=Verdict.BAD_DATA,
        sure=Sure.POSSIBLE,
        said="Single losses lie far above their neighbors.",
        evidence=(f"at step {listed}, and back after it",),
        steps=seen.spikes[:FEW],
        first=f"Look at the batch of step {seen.spikes[0]}; a learning rate that is "
        "a little too high does the same.",
    )


def _steady_before(log: RunLog, at: int) -> list[str]:
    finite = [v for s, v in log.series("loss") if s < at and math.isfinite(v)]
    norms = [v for s, v in log.series("gradient_norm") if s < at and math.isfinite(v)]
    said = [f"the loss before it was {finite[-1]:.4g}"] if finite else []
    return said + ([f"the gradient norm before it {norms[-1]:.3g}"] if norms else [])


def _rising_before(log: RunLog, at: int) -> bool:
    """Whether the loss had left its best well before the step."""
    before = RunLog(
        tuple(r for r in log.records if r.step < at), log.columns, (), log.precision
    )
    seen = facts.losses(before)
    return seen is not None and seen.rose_again


def _room(log: RunLog, at: int) -> str:
    """Say why it is no overflow."""
    largest = facts.largest_output(log, at)
    room = f"{BF16.max:.2g} is the most that {log.precision} has room for"
    if largest is None:
        return f"no overflow: {room}"
    return f"no overflow: outputs reached {largest[1]:.3g} ({largest[0]}), and {room}"


def layer_overflow(log: RunLog) -> Finding | None:
    """Outputs of a layer beyond fp16, or losses that no loss scale makes finite."""
    seen = facts.first_bad_output(log)
    bad = facts.bad_losses(log)
    if seen is not None and log.precision not in WIDE:
        return _overflow_seen(log, seen[0].step, seen[1])
    if not bad or log.precision in WIDE:
        return None
    if not (facts.stays_bad(log) or facts.gives_way(log)):
        return None
    if _rising_before(log, bad[0]):
        return None
    scale = facts.scale(log)
    evidence = [f"from step {bad[0]} on {len(bad)} losses are not finite"]
    evidence += _steady_before(log, bad[0])
    if scale is not None:
        evidence.append(
            f"the loss scale fell from {scale.highest:.3g} to {scale.last:.3g} "
            "without an end to it"
        )
    return Finding(
        verdict=Verdict.LAYER_OVERFLOW,
        sure=Sure.LIKELY if scale is not None else Sure.POSSIBLE,
        said="The forward pass itself overflows: no loss scale can help.",
        evidence=tuple(evidence),
        steps=(bad[0],),
        first="Run in bf16, or log with HealthMonitor once to learn which layer it is "
        f"and keep that one in fp32: fp16 ends at {FP16.max:.0f}.",
    )


def _overflow_seen(log: RunLog, step: int, layer: str) -> Finding:
    before = facts.largest_output(log, step)
    evidence = [f"at step {step} outputs of {layer} are the first that are not finite"]
    if before is not None:
        evidence.append(f"the largest output before it: {before[1]:.4g} in {before[0]}")
    scale = facts.scale(log)
    if scale is not None:
        evidence.append(
            f"{len(scale.skipped)} of {scale.steps} steps were left out, and the loss "
            f"scale fell to {scale.lowest:.3g}"
        )
    return Finding(
        verdict=Verdict.LAYER_OVERFLOW,
        sure=Sure.CERTAIN,
        said=f"Values in {layer} go beyond {FP16.max:.0f}, the largest of fp16.",
        evidence=tuple(evidence),
        steps=(step,),
        layers=(layer,),
        first=f"Run in bf16, or keep {layer} in fp32 (autocast off around it); a "
        "smaller loss scale does not help.",
    )


def backoff_loop(log: RunLog) -> Finding | None:
    """Steps left out again and again, with losses that are finite."""
    scale = facts.scale(log)
    if scale is None or scale.recent < LOOP:
        return None
    by_step = dict(log.series("loss"))
    known = [by_step[step] for step in scale.skipped if step in by_step]
    if known and sum(map(math.isfinite, known)) < len(known) / 2:
        return None  # the forward pass fails, whatever the scale
    told = any(r.skipped is not None for r in log.records)
    return Finding(
        verdict=Verdict.BACKOFF_LOOP,
        sure=Sure.CERTAIN if told and known else Sure.LIKELY,
        said="The loss scale is driven higher than the gradients allow, and steps are "
        "left out for it again and again.",
        evidence=(
            f"{len(scale.skipped)} of {scale.steps} steps were left out "
            f"({_percent(scale.left_out)}), the first at step {scale.skipped[0]}",
            f"the loss scale went from {scale.first:.3g} to {scale.last:.3g}, and lay "
            f"between {scale.lowest:.3g} and {scale.highest:.3g}",
            "the losses of those steps are finite: the forward pass is well",
        )[: 3 if known else 2],
        steps=scale.skipped[:FEW],
        first="Begin with a scale of 65536 and let it double after 2000 good steps "
        "(GradScaler's own settings), or train in bf16, which needs none.",
    )


def gradient_underflow(log: RunLog) -> Finding | None:
    """Gradients that are zero in fp16 for want of a loss scale."""
    if log.precision in SCALED or log.precision is None:
        rates = facts.median_by_layer(log, "zero_rate")
        worst = _worst(rates, LIMITS.zero_rate)
        if worst and log.precision is not None:
            return _underflow(
                Sure.CERTAIN,
                [
                    f"{_percent(rates[name])} of the gradient of {name} is zero"
                    for name in worst[:3]
                ]
                + [f"{len(worst)} of {len(rates)} layers are above 5 %"],
                "loss_scale" in log.columns,
                tuple(worst[:FEW]),
            )
    norms = [v for _, v in log.series("gradient_norm") if math.isfinite(v)]
    tiny = [v for v in norms if v < TINY_NORM]
    if log.precision in ("bf16", "fp32") or len(tiny) <= len(norms) / 2:
        return None
    said = f"the gradient norm is {tiny[-1]:.3g} at the end, and mostly under 1e-7"
    return _underflow(Sure.LIKELY, [said], "loss_scale" in log.columns, ())


def _underflow(
    sure: Sure, evidence: list[str], scaled: bool, layers: tuple[str, ...]
) -> Finding:
    if not scaled:
        evidence = [*evidence, "the log has no loss scale"]
    return Finding(
        verdict=Verdict.GRADIENT_UNDERFLOW,
        sure=sure,
        said="Gradients become zero: fp16 has nothing between 0 and 6e-8.",
        evidence=tuple(evidence),
        layers=layers,
        first="Give the loss scale more room: it is there to prevent this."
        if scaled
        else "Scale the loss (GradScaler, from 65536), or train in bf16.",
    )


def fp8_outlier(log: RunLog) -> Finding | None:
    """One value so large that FP8, with one scale, makes zero of the rest."""
    flushed = facts.median_flushed(log)
    worst = _worst(flushed, LIMITS.fp8_flushed)
    if not worst:
        return None
    return Finding(
        verdict=Verdict.FP8_OUTLIER,
        sure=Sure.CERTAIN,
        said="Tensors share an FP8 scale with an outlier, and most of them becomes "
        "zero.",
        evidence=tuple(
            f"{_percent(flushed[name])} of the values of {name} become zero"
            for name in worst[:3]
        ),
        layers=tuple(worst[:FEW]),
        first="Scale by channel, row or block, or keep these layers in bf16: "
        + ", ".join(dict.fromkeys(name.rsplit(".", 1)[0] for name in worst[:3])),
    )


def frozen_weights(log: RunLog) -> Finding | None:
    """Updates that round away: weights in 16 bits without an fp32 copy."""
    shares = facts.median_by_layer(log, "unchanged")
    worst = _worst(shares, LIMITS.unchanged)
    if worst:
        return _frozen(
            Sure.CERTAIN,
            [
                f"{_percent(shares[name])} of the weights of {name} stay as they are"
                for name in worst[:3]
            ]
            + [f"{len(worst)} of {len(shares)} layers are above 50 %"],
            tuple(worst[:FEW]),
        )
    seen = facts.losses(log)
    if shares or seen is None or log.records[0].step > log.every:
        return None
    if abs(seen.fell) > SETTLED or abs(seen.first - seen.best) > SETTLED * seen.first:
        return None
    norms = [v for _, v in log.series("gradient_norm") if math.isfinite(v)]
    rates = [v for _, v in log.series("learning_rate")]
    if rates and max(rates) == 0:
        return _no_rate(len(rates))
    alive = bool(norms) and norms[-1] > TINY_NORM
    evidence = [f"the loss went from {seen.first:.4g} to {seen.last:.4g}"]
    if alive:
        evidence.append(f"the gradient norm is {norms[-1]:.3g}: there is much to learn")
    if rates:
        evidence.append(f"the learning rate reached {max(rates):.3g}")
    if norms and not alive:
        return None
    return _frozen(Sure.LIKELY if alive else Sure.POSSIBLE, evidence, ())


def _frozen(sure: Sure, evidence: list[str], layers: tuple[str, ...]) -> Finding:
    return Finding(
        verdict=Verdict.FROZEN_WEIGHTS,
        sure=sure,
        said="The weights hardly move: updates are smaller than their format's steps "
        "and round away.",
        evidence=tuple(evidence),
        layers=layers,
        first="Keep the weights in fp32 and compute in 16 bits (autocast), or round "
        "updates stochastically. If they are in fp32, raise the learning rate.",
    )


def _no_rate(records: int) -> Finding:
    return Finding(
        verdict=Verdict.LEARNING_RATE,
        sure=Sure.CERTAIN,
        said="The learning rate is 0: no weight can move.",
        evidence=(f"it is 0 in all {records} records that have one",),
        first="Set a learning rate, and look at its schedule: one that counts epochs "
        "for steps stays at the 0 that it begins with.",
    )


def learning_rate(log: RunLog) -> Finding | None:
    """A loss that leaves its best for good, with gradients that grow."""
    seen = facts.losses(log)
    if seen is None or not seen.rose_again:
        return None
    growth = facts.norm_growth(log)
    rates = dict(log.series("learning_rate"))
    evidence = [
        f"the loss was {seen.best:.4g} at step {seen.best_step} and is {seen.last:.4g} "
        f"at the end; it began at {seen.first:.4g}"
    ]
    if growth is not None:
        evidence.append(f"the gradient norm is {growth:.3g} times what it was at first")
    if seen.best_step in rates:
        evidence.append(f"the learning rate at step {seen.best_step} was "
                        f"{rates[seen.best_step]:.3g}")  # fmt: skip
    strong = growth is not None and growth > FAST_NORMS
    return Finding(
        verdict=Verdict.LEARNING_RATE,
        sure=Sure.LIKELY if strong or rates else Sure.POSSIBLE,
        said="The run diverges by and by, with finite values: the learning rate is too "
        "high for it.",
        evidence=tuple(evidence),
        steps=(seen.best_step,),
        first="Halve the learning rate, or warm up for longer, and clip gradients at 1.",
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _worst(values: Mapping[str, float], limit: float) -> list[str]:
    beyond = [name for name, value in values.items() if value > limit]
    return sorted(beyond, key=lambda name: -values[name])


SIGNS: tuple[Sign, ...] = (
    bad_data,
    layer_overflow,
    fp8_outlier,
    gradient_underflow,
    backoff_loop,
    frozen_weights,
    learning_rate,
)
