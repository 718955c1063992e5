"""What a job learns of its tensors, in parts that other processes may compute."""

import json

import pytest
import torch

from optimizer.calibrate import amaxes, calibrate
from optimizer.evidence import (
    ATTENTION_TOKENS,
    Evidence,
    attention_of_choices,
    attention_of_stack,
    before_and_after,
    packed,
    unpacked,
)
from optimizer.execute import Amaxes, WeightCodes
from optimizer.model import LoadedModel
from optimizer.stack import CHOICES, Component, Site, Stack, choice_named
from optimizer.top_weight import WatchedReference
from tests.optimizer import tiny
from tests.optimizer.test_statistics import facts
from tests.optimizer.test_watch import Watch

CANDIDATES = {
    Site(layer, component): CHOICES[component]
    for layer in (0, 1)
    for component in (Component.ATTN_SCORES, Component.ATTN_SOFTMAX, Component.FFN_IN)
}


@pytest.fixture(scope="module")
def calibrated() -> tuple[LoadedModel, Amaxes, WeightCodes]:
    model = tiny.loaded()
    return model, amaxes(calibrate(model, [tiny.ids()])), WeightCodes(model)


def watched(*seeds: int) -> Watch:
    watch = Watch()
    with torch.no_grad():
        for seed in seeds:
            watch.statistics.ids = tiny.ids(seed=seed)
            tiny.loaded().forward(tiny.ids(seed=seed), watch)
    return watch


def test_parts_that_were_packed_make_the_whole() -> None:
    whole = watched(1, 2).statistics
    parts = [packed(watched(seed).statistics) for seed in (1, 2)]
    for order in (parts, parts[::-1]):
        found = unpacked(order)
        assert found.places.keys() == whole.places.keys()
        assert all(facts(found.places[p]) == facts(s) for p, s in whole.places.items())
    assert packed(unpacked(parts)) == packed(unpacked(parts[::-1]))  # one worker or two
    assert unpacked([]).places == {}


def test_the_attention_of_choices_and_of_a_stack_stand_side_by_side(
    calibrated: tuple[LoadedModel, Amaxes, WeightCodes],
) -> None:
    model, largest, weights = calibrated
    choices = attention_of_choices(model, tiny.ids(), CANDIDATES, largest, weights)
    reference = WatchedReference()
    with torch.no_grad():
        model.forward(tiny.ids(), reference)
    assert [r["before"] for r in choices["layers"]] == [
        reference.top[n].mean for n in (0, 1)
    ]
    tried = choices["layers"][0]["choices"]
    assert tried.keys() == {"attn_scores", "attn_softmax"}  # what is inside attention
    assert "fp32" not in tried["attn_softmax"]  # it moves nothing
    # A stack of one choice does to its own layer what the choice alone does.
    site = Site(0, Component.ATTN_SOFTMAX)
    stack = Stack({site: choice_named(site.component, "fp8_e5m2")})
    after = attention_of_stack(model, tiny.ids(), stack, largest, weights)
    rows = before_and_after(choices, after)
    assert rows[0]["after"] == tried["attn_softmax"]["fp8_e5m2"]
    assert rows[1]["after"] != rows[1]["before"]  # it carries the error on
    assert json.loads(json.dumps(rows)) == rows


def test_only_the_start_of_a_long_sequence_is_run(
    calibrated: tuple[LoadedModel, Amaxes, WeightCodes],
) -> None:
    model, largest, weights = calibrated
    long = tiny.ids(ATTENTION_TOKENS + 40)
    short = long[:, :ATTENTION_TOKENS]
    found = [
        attention_of_stack(model, ids, Stack(), largest, weights)
        for ids in (long, short)
    ]
    assert found[0] == found[1]


def test_the_section_of_the_document_is_plain_json() -> None:
    row = {"layer": 0, "before": 0.5, "after": 0.4, "choices": {}}
    section = Evidence(watched(1).statistics, (row,), 24, str).to_json()
    assert json.loads(json.dumps(section, allow_nan=False)) == section
    assert section["sequence_tokens"] == 24
    assert section["attention"] == [row]
    assert {p["component"] for p in section["places"]} >= {"norms", "attn_qkv"}
    assert Evidence().to_json()["places"] == []
