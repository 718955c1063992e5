"""The lines that a job tells of itself."""

from dataclasses import replace

from optimizer import narrate
from optimizer.stack import CHOICES, Component, Site

BF16 = CHOICES[Component.NORMS][0]
SITE = Site.parse("layers.0.attn_qkv")


def test_the_most_frequent_reasons_come_first_and_the_rest_are_counted() -> None:
    reasons = [f"reason {n}" for n in range(narrate.MOST_REASONS + 3)]
    choices = {
        replace(BF16, name=f"c{n}"): why
        for n, why in enumerate([*reasons, reasons[-1]])
    }
    first, *others, last = narrate.refused({SITE: choices})
    assert first == f"Refused 2 times: {reasons[-1]}"
    assert len(others) == narrate.MOST_REASONS - 1
    assert last == "and for 3 more reasons; the report has all"
    assert narrate.refused({SITE: {BF16: None}}) == []


def test_what_was_measured_stands_beside_its_sum() -> None:
    said = narrate.measured([(0.02, 0.01)]).replace("\u00a0", " ")
    assert said == "Measured a stack: 0.0100 nats (its sites add up to 0.0200 nats)"
