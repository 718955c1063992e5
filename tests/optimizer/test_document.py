"""What a run says holds together, for devices of every kind."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from optimizer import casts
from optimizer.document import shown_as
from optimizer.document_sites import casts_into
from optimizer.hardware import device
from optimizer.keyed import CONTRAST_TOKENS
from optimizer.plan import AS_GOOD
from optimizer.stack import CHOICES, Component, Stack, choice_named
from tests.optimizer.conftest import Document, chosen
from tests.optimizer.example_document import example_document
from tests.optimizer.toy import BATCH, DOWN, FFN, NORMS, OUT, chooser, toy
from tests.service import LAYERS

HARDWARE = ("h100", "l4", "t4", "mi300x", "local")
SLOW = pytest.mark.slow
QUICK = (  # a device costs a second or two, whatever many tests look at it
    "h100",
    "t4",
    *(pytest.param(h, marks=SLOW) for h in ("l4", "mi300x", "local")),
)
SITES_OF_A_LAYER = 10


@pytest.fixture(params=QUICK)
def document(
    request: pytest.FixtureRequest, document_of: Callable[[str], Document]
) -> Document:
    return document_of(request.param)


def point(document: Document, name: str) -> Document:
    return next(p for p in document["front"] if p["id"] == name)


def test_the_document_is_plain_json(document: Document) -> None:
    text = json.dumps(document, allow_nan=False)
    assert json.loads(text) == document  # no tuples, no numbers as keys


def shape(value: Any, free: tuple[str, ...] = ()) -> set[str]:
    """Every path of keys; what `free` names has keys of its own."""
    if isinstance(value, list):
        return {p for v in value for p in shape(v, free)}
    if not isinstance(value, dict):
        return set()
    inner = ((k, set() if k in free else shape(v, free)) for k, v in value.items())
    return {path for k, some in inner for path in {k, *(f"{k}.{p}" for p in some)}}


def test_the_documents_keys_are_those_that_reports_are_made_from(
    document_of: Callable[[str], Document],
) -> None:
    free = (
        "exported",
        "stack",
        "choices",
        "precision_stack",
        "stored_dtypes",
        "versions",
    )
    empty = ("unrecognized",)  # every module of this model is recognized
    example = shape(example_document(), (*free, *empty))
    of_fp8 = ("stability.components.", "stability.pays_up_to.")  # none is chosen here
    fp8_alone = {key for key in example if key.startswith(of_fp8)}
    assert example - fp8_alone <= shape(document_of("h100"), (*free, *empty))


def test_the_front_holds_no_point_that_another_beats(document: Document) -> None:
    front = document["front"]
    assert len(front) >= 5
    assert [p["id"] for p in front] == [f"p{i}" for i in range(len(front))]
    axes = ("per_token_s", "kl_nats", "memory_bytes")
    for a, b in itertools.permutations(front, 2):
        assert not all(a[k] <= b[k] for k in axes), (a["id"], b["id"])
    seconds = [p["per_token_s"] for p in front]
    assert seconds == sorted(seconds)


def test_what_is_chosen_is_on_the_front_and_validated(document: Document) -> None:
    it = chosen(document)
    assert it["front_id"] == document["verdict"]["chosen"]
    found = point(document, it["front_id"])
    assert found["validated"]
    assert found["kl_nats"] == it["predicted_kl_nats"]
    for key in ("per_token_s", "first_token_s", "bytes", "memory_bytes", "fp8_share"):
        assert found[key] == it[key]
    kl = it["kl_nats"]
    assert 0.0 <= kl["low"] <= kl["value"] <= kl["high"]
    assert [s["id"] for s in document["validation"]["stacks"] if s["chosen"]] == [
        "chosen"
    ]


def test_validated_points_go_by_their_place_on_the_front(document: Document) -> None:
    for stack in document["validation"]["stacks"]:
        if stack["id"].startswith("p"):
            assert stack["id"] == stack["front_id"]
            assert point(document, stack["id"])["validated"]


@pytest.mark.parametrize(
    ("label", "where", "shown"),
    [
        ("p4", "p3", "p3"),  # one before it was refuted by measurement
        ("p4", None, "refuted_p4"),
        ("chosen", "p4", "chosen"),
        ("all_bf16", None, "all_bf16"),
    ],
)
def test_a_point_that_moved_is_named_anew(
    label: str, where: str | None, shown: str
) -> None:
    assert shown_as(label, where) == shown


def test_sites_and_layers_say_the_stack_that_was_chosen(document: Document) -> None:
    stack = point(document, document["verdict"]["chosen"])["stack"]
    assert {s["site"]: s["choice"] for s in document["sites"]} == stack
    assert len(document["sites"]) == LAYERS * SITES_OF_A_LAYER + 3
    by_layer = {
        f"layers.{row['layer']}.{component}": choice
        for row in document["layers"]
        for component, choice in row["choices"].items()
    }
    whole = {s: stack[s] for s in ("embeddings", "norms", "lm_head")}
    assert {**whole, **by_layer} == stack
    assert [row["layer"] for row in document["layers"]] == list(range(LAYERS))


def test_every_stack_of_the_front_can_be_read_back(document: Document) -> None:
    sites = {s["site"] for s in document["sites"]}
    for found in document["front"]:
        stack = Stack.from_json(found["stack"])
        assert stack.to_json() == found["stack"]
        assert {str(s) for s in stack.choices} == sites


def test_figures_of_the_sites_add_up(document: Document) -> None:
    it = chosen(document)
    for key, total in (
        ("per_token_s", it["per_token_s"]),
        ("first_token_s", it["first_token_s"]),
        ("kl_nats", it["added_kl_nats"]),
    ):
        alone = math.fsum(r[key] for r in document["sites"])
        cast = math.fsum(r["casts"].get(key, 0.0) for r in document["sites"])
        assert alone + cast == pytest.approx(total, rel=1e-9)
        added = math.fsum(r[key] for r in document["components"])
        assert added == pytest.approx(total, rel=1e-9)
    assert sum(c["sites"] for c in document["components"]) == len(document["sites"])
    for row in document["components"]:
        assert sum(row["choices"].values()) == row["sites"]
        assert document["precision_stack"][row["component"]] == row["choice"]
        assert row["choices"][row["choice"]] == max(row["choices"].values())


def test_a_cast_is_paid_by_the_component_that_reads() -> None:
    shape = toy()
    some = chooser(shape=shape)
    some = replace(some, casts=casts.modelled(shape, device("l4"), BATCH))
    stack = some.uniform("bf16")
    wide = Stack({**stack.choices, NORMS: choice_named(Component.NORMS, "fp32")})
    assert casts_into(some.casts, (FFN,), stack).per_token_s == 0.0
    paid = casts_into(some.casts, (FFN,), wide)
    assert 0.0 < paid.per_token_s < paid.first_token_s
    assert casts_into(some.casts, (OUT,), wide).per_token_s == 0.0
    components = [{FFN}, {OUT, NORMS}, {DOWN}]
    parts = [casts_into(some.casts, c, wide).per_token_s for c in components]
    alone = math.fsum(some.row(s, c).cost.per_token_s for s, c in wide.choices.items())
    assert alone + sum(parts) == pytest.approx(some.totals(wide).per_token_s)


def test_every_choice_of_every_site_has_figures_or_a_reason(document: Document) -> None:
    for site in document["sites"]:
        component = Component(site["component"])
        rows = {a["choice"]: a for a in site["alternatives"]}
        assert list(rows) == [c.name for c in CHOICES[component]]
        assert rows[site["choice"]]["refused"] is None
        for row in rows.values():
            figures = [row[k] for k in ("kl_nats", "per_token_s", "bytes")]
            if row["refused"] is None:
                assert all(math.isfinite(v) and v >= 0 for v in figures)
                assert 0.0 <= row["saturated"] <= 1.0
                assert 0.0 <= row["flushed"] <= 1.0
            else:
                assert figures == [None, None, None]
        narrow = next(c for c in CHOICES[component] if c.name == site["choice"]).is_fp8
        assert (site["reason"] is None) == narrow


@SLOW
def test_baselines_are_those_of_the_device(
    document_of: Callable[[str], Document],
) -> None:
    wanted = {
        "h100": {"all_bf16", "all_e4m3"},
        "l4": {"all_bf16", "all_e4m3"},
        "mi300x": {"all_bf16", "all_e4m3"},
        "t4": {"all_fp16"},
        "local": {"all_bf16", "all_e4m3_weight_only"},
    }
    for hardware, labels in wanted.items():
        ids = {s["id"] for s in document_of(hardware)["validation"]["stacks"]}
        assert {i for i in ids if i.startswith("all_")} == labels
        assert "chosen" in ids


def test_a_device_without_fp8_gets_none(document_of: Callable[[str], Document]) -> None:
    for found in document_of("t4")["front"]:
        assert set(found["stack"].values()) <= {"fp32", "fp16"}


@SLOW
def test_local_latency_is_measured_and_the_rest_is_modelled(
    document_of: Callable[[str], Document],
) -> None:
    for hardware in HARDWARE:
        found = document_of(hardware)
        basis = "measured" if hardware == "local" else "modelled"
        assert found["hardware"]["basis"] == basis
        assert basis in found["verdict"]["sentence"]
        assert all(p["per_token_s"] > 0 for p in found["front"])


def test_without_a_target_nothing_is_lost_that_16_bits_keep(
    document: Document,
) -> None:
    stacks = {s["id"]: s for s in document["validation"]["stacks"]}
    base = next(v for k, v in stacks.items() if k in ("all_bf16", "all_fp16"))
    it = stacks["chosen"]
    assert it["kl_nats"]["value"] <= AS_GOOD * base["kl_nats"]["value"]
    assert it["per_token_s"] <= base["per_token_s"]
    assert document["verdict"]["outcome"] in ("sla_met", "no_improvement")


def test_other_data_is_compared(document: Document) -> None:
    contrast = document["contrast"]
    assert contrast["distribution"] == "code"
    assert contrast["tokens"] == CONTRAST_TOKENS
    assert -1.0 <= contrast["rank_correlation"] <= 1.0


def test_a_context_beyond_the_calibrated_length_is_warned_about(
    document: Document,
) -> None:
    # Case B5: scales from 64 tokens say little about 640.
    (said,) = document["warnings"]
    assert "640 tokens of context" in said
    assert "sequences of 64" in said
    assert any("measured at 64 tokens" in limit for limit in document["limits"])


# Statistics of the tensors


def test_every_site_says_who_sets_its_scale_and_what_collapses(
    document_of: Callable[[str], Document],
) -> None:
    document = document_of("h100")
    section = document["statistics"]
    assert section["sequence_tokens"] == document["request"]["sequence_tokens"]
    named = {(p["site"], p["role"]) for p in section["places"]}
    for site in document["sites"]:
        if site["component"] not in ("embeddings", "attn_values", "kv_cache"):
            assert (site["site"], "input") in named
        for a in site["alternatives"]:
            if a["refused"] is None and a["choice"] == "fp8_e4m3":
                assert 0 < a["collapsed_pairs"] < a["collapsed"] < 1
            if a["refused"] is None and a["choice"] == "fp32":
                assert a["collapsed"] == a["collapsed_pairs"] == 0


def test_e5m2_is_explained_wherever_it_was_measured(
    document_of: Callable[[str], Document],
) -> None:
    for site in document_of("h100")["sites"]:
        measured = {
            a["choice"]: a["kl_nats"] for a in site["alternatives"] if not a["refused"]
        }
        pair = [measured.get(c) for c in ("fp8_e4m3", "fp8_e5m2")]
        if None in pair:
            assert site["range"] is None
        elif pair[1] > 1.05 * pair[0]:
            assert site["range"].startswith("precision-limited")
        else:
            assert site["range"].startswith(("range-limited", "even"))


def test_the_top_attention_weight_stands_before_and_after(
    document_of: Callable[[str], Document],
) -> None:
    rows = document_of("h100")["statistics"]["attention"]
    assert [r["layer"] for r in rows] == list(range(LAYERS))
    for row in rows:
        assert 0 < row["before"] <= 1
        assert row["after"] == pytest.approx(row["before"], rel=0.2)
        assert row["choices"].keys() == {"attn_scores", "attn_softmax"}
