"""What a job tells of itself while it runs, a line at a time, for its owner.

Lines are for people; what programs read is in the report.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from optimizer.stack import Choice, ModelShape, Site
from optimizer.tokens import Tokens
from optimizer.units import nats

Said = Callable[[str], None]
"""Hears a line, without its end."""

MOST_REASONS = 8  # why choices are refused: each line has another reason

Verdicts = Mapping[Site, Mapping[Choice, str | None]]


def nobody(line: str) -> None:
    """Hear nothing."""


def model(shape: ModelShape, device: str, basis: str) -> str:
    """Say what was read, and what its seconds are."""
    return (
        f"Read {shape.architecture}: {shape.layers} layers, {shape.parameters} "
        f"parameters, {len(shape.sites)} sites; latency on {device} is {basis}"
    )


def data(tokens: Tokens) -> str:
    """Say how much of the data is read for what."""
    halves = (
        f"{half.tokens} tokens in {len(half.sequences)} sequences of {half.samples} "
        f"samples {purpose}"
        for half, purpose in (
            (tokens.calibration, "to calibrate"),
            (tokens.validation, "held out"),
        )
    )
    return f"Read {tokens.dataset.name}: {', '.join(halves)}"


def swept(wanted: Mapping[Site, Sequence[Choice]], verdicts: Verdicts) -> str:
    """Say how much is swept."""
    of = sum(map(len, verdicts.values()))
    count = sum(map(len, wanted.values()))
    return f"Sweeps {count} of {of} choices at {len(wanted)} sites; {of - count} are refused"


def refused(verdicts: Verdicts) -> list[str]:
    """Say why choices are refused, the most frequent reasons first."""
    reasons = Counter(why for some in verdicts.values() for why in some.values() if why)
    lines = [
        f"Refused {count} times: {why}"
        for why, count in reasons.most_common(MOST_REASONS)
    ]
    more = len(reasons) - len(lines)
    return (
        [*lines, f"and for {more} more reasons; the report has all"] if more else lines
    )


def doubted(pairs: Sequence[tuple[Site, Choice]]) -> str:
    """Say which losses the sweep leaves open."""
    return (
        f"Ran {len(pairs)} choices alone, whose losses the sweep could not tell apart"
    )


def measured(found: Sequence[tuple[float, float]]) -> str:
    """Say what stacks lost, beside what their sites' losses add up to; in nats."""
    said = (f"{nats(kl)} (its sites add up to {nats(added)})" for added, kl in found)
    stacks = "a stack" if len(found) == 1 else f"{len(found)} stacks"
    return f"Measured {stacks}: {', '.join(said)}"
