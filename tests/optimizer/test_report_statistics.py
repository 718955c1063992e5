"""The report's section on tensors says what the document's statistics hold."""

from typing import Any

import pytest
import torch

from optimizer.report import render_html
from optimizer.report_statistics import bucket_name, heat, statistics
from optimizer.stack import Component, Role, Site
from optimizer.statistics import Layout, SiteStats, bucket_of
from tests.optimizer.example_document import example_document
from tests.optimizer.numbers import normal
from tests.optimizer.page import Page

Document = dict[str, Any]


def place(component: Component, layer: int, stats: SiteStats) -> Document:
    site = Site(layer, component)
    return {
        "site": str(site),
        "component": str(component),
        "layer": layer,
        "role": str(Role.INPUT),
        **stats.to_json({3: "<s>"}.get),  # type: ignore[arg-type]
    }


def seen(x: torch.Tensor, layout: Layout = Layout.ROWS) -> SiteStats:
    stats = SiteStats(layout)
    stats.add(x, ids=torch.full((1, x.shape[-2]), 3))
    return stats


def places() -> list[Document]:
    sink = normal(1, 64, 32)
    sink[0, 0, 7] = 500.0
    grown = normal(1, 64, 32)
    grown[0, 32:] *= 6.0
    heads = normal(1, 2, 64, 16)
    heads[0, 1, 9, 5] = 90.0
    return [
        place(Component.NORMS, 0, seen(normal(1, 64, 32))),
        place(Component.NORMS, 1, seen(sink)),
        place(Component.FFN_IN, 1, seen(grown)),
        place(Component.ATTN_SCORES, 0, seen(heads, Layout.HEADS)),
    ]


ATTENTION = [
    {
        "layer": n,
        "before": 0.5 + n / 10,
        "after": 0.4 + n / 10,
        "choices": {"attn_softmax": {"fp32": 0.5 + n / 10, "fp8_e5m2": 0.3}},
    }
    for n in range(2)
]
RANGES = {
    0: "precision-limited: e5m2 loses more than e4m3",
    1: "range-limited: e5m2 loses less than e4m3 <b>",
}


@pytest.fixture(scope="module")
def document() -> Document:
    d = example_document(2)
    d["statistics"] = {
        "sequence_tokens": 64,
        "places": places(),
        "attention": ATTENTION,
    }
    for site in d["sites"]:
        for a in site["alternatives"]:
            if a["kl_nats"] is not None:
                a["collapsed"] = {"fp8_e4m3": 0.71, "fp8_e5m2": 0.86}.get(a["choice"])
                a["collapsed_pairs"] = 0.013
        if site["component"] == "ffn_out":
            site["range"] = RANGES[site["layer"]]
            site["scales"] = "one scale for all tokens is set by <s>"
    return d


@pytest.fixture(scope="module")
def page(document: Document) -> Page:
    return Page(render_html(document))


def test_sinks_and_channels_are_named(page: Page) -> None:
    # Case B4: the report names the sink token and the channel.
    row = page.row("statistics", "layers.1.norms")
    assert row[0] == "layers.1.norms input"
    assert row[1] == "500"
    assert row[3].startswith("position 0 '<s>' ")
    assert row[4].startswith("7 ")
    assert page.row("statistics", "layers.0.attn_scores")[4].startswith("5 of head 1 ")


def test_each_kind_of_place_is_shown_by_its_most_striking_layer(
    document: Document,
) -> None:
    loud = normal(1, 64, 32)
    loud[0, 0, 7] = 90.0
    more = [*places(), place(Component.NORMS, 2, seen(loud))]
    found = statistics({"statistics": {"places": more}}, [])
    assert found is not None
    kinds = [(p["component"], p["role"]) for p in found["outliers"]]
    assert len(kinds) == len(set(kinds))
    assert "layers.1.norms" in [p["site"] for p in found["outliers"]]
    assert [p["site"] for p in found["more_outliers"]] == ["layers.2.norms"]
    assert found["quiet"] + len(found["outliers"]) + 1 == len(more)


def test_positions_are_in_multiples_of_what_is_usual(page: Page) -> None:
    head = next(r for r in page.rows["statistics"] if r[0].strip() == "place")
    assert head[1:] == ["0", "1", "2–3", "4–7", "8–15", "16–31", "32–63"]
    rows = {r[0].strip(): r[1:] for r in page.rows["statistics"] if len(r) == len(head)}
    assert float(rows["norms input"][0]) > 100  # the sink
    assert float(rows["ffn_in input"][-1]) > 4  # what grows with the length
    assert float(rows["ffn_in input"][-2]) < 2


def test_bucket_names_are_the_positions_of_the_buckets() -> None:
    for position in range(3000):
        name = bucket_name(int(bucket_of(torch.tensor(position))))
        first, _, last = name.replace(",", "").partition("–")
        assert int(first) <= position <= int(last or first)


def test_the_top_attention_weight_is_shown_before_and_after(page: Page) -> None:
    stack = page.row("attention", "the")
    assert stack[:5] == ["the chosen stack", "all", "0.5500", "0.4500", "−18.2 %"]
    e5m2 = page.row("attention", "fp8_e5m2")
    assert e5m2[1:4] == ["attn_softmax", "0.5500", "0.3000"]
    assert e5m2[5] == "1: 0.600 → 0.300"
    assert page.row("attention", "fp32")[4] == "0 %"


def test_collapsed_shares_stand_by_component_and_choice(page: Page) -> None:
    head = next(r for r in page.rows["statistics"] if r[0].strip() == "component")
    row = page.row("statistics", "attn_qkv")
    found = dict(zip(head, row, strict=True))
    assert (found["fp8_e4m3"], found["fp8_e5m2"]) == ("71 %", "86 %")


def test_sites_are_grouped_by_what_limits_them(page: Page) -> None:
    text = page.text["statistics"]
    assert "1 site precision-limited: e5m2 loses" in text
    assert "1 site range-limited: e5m2 wins" in text
    assert RANGES[1] in text  # escaped: it is read back as it was
    assert "one scale for all tokens is set by <s>" in text


def test_a_document_without_statistics_has_no_section() -> None:
    html = render_html(example_document(2))
    assert 'id="statistics"' not in html
    assert "#statistics" not in html


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"places": None, "attention": None},
        {"places": [None, {}, {"site": "x"}], "attention": [{}, {"layer": 0}]},
        {
            "places": [
                {
                    "site": "x",
                    "positions": [None, 0.0],
                    "tokens": [{}],
                    "channels": [{}],
                }
            ],
            "attention": [{"layer": 0, "before": 0.5, "choices": {"x": {"y": None}}}],
        },
    ],
)
def test_what_is_missing_is_shown_as_missing(broken: Document) -> None:
    document = example_document(2) | {"statistics": broken}
    assert 'id="statistics"' in render_html(document)


def test_colors_count_the_steps_that_are_reached() -> None:
    assert heat(None, (1.0, 2.0)) is None
    assert [heat(v, (1.0, 2.0)) for v in (0.5, 1.0, 2.5)] == [0, 1, 2]
