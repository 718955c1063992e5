"""What the page says of the stack beyond the mean, and what stands out there."""

import copy
from typing import Any

import pytest

from optimizer import report_beyond
from optimizer.report import render_html
from tests.optimizer.example_document import example_document
from tests.optimizer.page import Page, three


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return example_document(layers=2)


@pytest.fixture(scope="module")
def page(document: dict[str, Any]) -> Page:
    return Page(render_html(document))


def test_kl_is_shown_by_length_and_by_distribution(
    document: dict[str, Any], page: Page
) -> None:
    rows = {r[0]: r for r in page.rows["validation"] if len(r) in (6, 7)}
    for r in document["by_position"]:
        row = rows[f"{r['from']} to {r['to']}"]
        assert row[1] == r["source"]
        assert row[3].startswith(three(r["kl_nats"]["value"]))
    first, second = document["by_distribution"]
    row = rows[second["distribution"]]
    assert row[2].startswith(three(second["kl_nats"]["value"]))
    times = second["kl_nats"]["value"] / first["kl_nats"]["value"]
    assert row[3] == three(times) + "×"


def test_stability_says_what_falls_back_and_up_to_where_fp8_pays(page: Page) -> None:
    text = " ".join(page.text["stability"].split())
    assert "Tokens that fall back0.250 %" in text.replace(" 0.250", "0.250")
    assert "fewer than 35.0 % of the tokens of a decode step" in text
    assert "up to 0.210 %, layers.7.attn_qkv" in text


def test_a_worst_token_stands_in_its_text_with_what_each_would_have_said(
    document: dict[str, Any], page: Page
) -> None:
    first, last = (
        [cell.strip() for cell in r]
        for r in page.rows["stability"]
        if len(r) == 5 and "sequence" in r[4]
    )
    worst = document["worst_tokens"]
    assert first[1] == (worst[0]["before"] + worst[0]["next"]).strip()
    assert first[2:4] == ["Benet", "de other"]
    assert last[1] == worst[1]["before"]  # nothing followed
    assert last[3] == ". same"


def test_texts_stand_side_by_side_and_a_loop_is_named(page: Page) -> None:
    text = " ".join(page.text["generation"].split())
    assert "✗ More loops." in text
    assert "The stack ends in a loop on 1 of 1 prompts, the reference on 0" in text
    assert "61.0 % repeated; loops from token 3 with period 3" in text
    assert "Equal for 3 tokens; what follows is marked." in text


def test_texts_are_cut_where_they_part() -> None:
    found = report_beyond.generation(example_document(layers=1)["generation"])
    assert found is not None
    (row,) = found["continuations"]
    assert row["reference"]["same"] == row["stack"]["same"] == " medium-sized"
    assert row["stack"]["other"].startswith(" mammal")


def test_equal_texts_are_no_more_loops(document: dict[str, Any]) -> None:
    same = copy.deepcopy(document)
    row = same["generation"]["continuations"][0]
    row["stack"] = row["reference"]
    same["generation"]["loops"] = {"reference": 0, "stack": 0}
    text = Page(render_html(same)).text["generation"]
    assert "✓ No more loops." in text
    assert "Both are the same" in text


def test_without_text_the_section_says_why(document: dict[str, Any]) -> None:
    text = Page(render_html({**document, "generation": None})).text["generation"]
    assert "Nothing was generated" in text


def test_ends_of_lines_can_be_seen() -> None:
    assert report_beyond.visible("a\n\tb") == "a↵\n⇥b"
