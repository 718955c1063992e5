"""What somebody named does no harm, in whatever form the report is read."""

import copy
import csv
import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

from optimizer.report import front_svg, render_html, view
from optimizer.report_blocks import Table
from optimizer.report_csv import COLUMNS, render_csv
from optimizer.report_markdown import render_markdown
from optimizer.report_outline import outline
from optimizer.report_pdf import render_pdf
from optimizer.report_text import fenced, markdown, no_formula
from tests.optimizer.example_document import example_document
from tests.optimizer.page import three

TURNING = re.compile("[\x00\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
HOSTILE = (
    '<script>alert(1)</script><img src=x onerror="alert(2)">',
    '=HYPERLINK("http://e.com","x")',
    "+1+cmd|' /C calc'!A0",
    "-2+3",
    "@SUM(1,1)",
    "\t=1+1",
    "layers.\u202egnp.\u2066exe\u200f\x00\ud800",
    "](javascript:alert(1)) ![x](http://e.com/x.png) [a][b]",
    "``` \n# heading\n| a | b |\n</code></pre>",
    '#panic("x") $x$ #import "@preview/a:1" \\ *b* _c_ <label> @ref // comment',
    'a,b;"c"\r\nd',
)


def hostile(text: str) -> dict[str, Any]:
    """A document in which everything that somebody else may name is this text."""
    document = copy.deepcopy(example_document(layers=2))  # it shares its constants
    document["model"] |= {"name": text, "architecture": text, "warnings": [text]}
    document["model"]["unrecognized"][0] |= {"module": text, "reason": text}
    document["request"] |= {"model": text, "data_distribution": text}
    document["data"] |= {"distribution": text, "origin": text, "licence": text}
    document["verdict"] |= {"sentence": text, "would_meet": [text]}
    document["hardware"] |= {"name": text, "method": text, "notes": [text]}
    document["executed_on"] |= {"device": text, "processor": text}
    document["sites"][1] |= {"site": text, "reason": text, "choice": "bf16"}
    document["worst_tokens"][0] |= dict.fromkeys(
        ("before", "next", "reference", "stack"), text
    )
    written = document["generation"]["continuations"][0]
    written["prompt"] = text
    written["stack"]["text"] = written["reference"]["text"] = text
    document["by_distribution"][1]["distribution"] = text
    document["validation"]["stacks"][0]["label"] = text
    document["limits"] = document["warnings"] = [text]
    document["provenance"]["versions"] = {text: text}
    document["front"][0]["stack"] = {text: text}
    document["exported"] = {
        "asked": [text],
        "files": [{"name": text, "consumer": text, "bytes": 1, "sha256": text}],
        "refused": [{"export": text, "reason": text}],
        "deviations": [
            dict.fromkeys(
                ("export", "site", "measured", "served", "toward", "reason"), text
            )
        ],
        "checkpoint": None,
    }
    return document


class Tags(HTMLParser):
    """The tags and the attributes of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.names: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        self.names |= {name for name, _ in attrs}


@pytest.mark.parametrize("text", HOSTILE)
def test_a_page_has_no_tag_that_a_tame_one_has_not(text: str) -> None:
    tame = example_document(layers=2) | {"exported": hostile("x")["exported"]}
    plain, found = Tags(render_html(tame)), Tags(render_html(hostile(text)))
    assert found.found <= plain.found
    assert found.names <= plain.names
    assert not TURNING.search(render_html(hostile(text)))


@pytest.mark.parametrize("text", HOSTILE)
def test_no_cell_of_the_csv_is_a_formula(text: str) -> None:
    written = render_csv(hostile(text))
    rows = list(csv.reader(io.StringIO(written, newline="")))
    assert rows[0] == list(COLUMNS)
    assert {len(row) for row in rows} == {len(COLUMNS)}
    for row in rows[1:]:
        for cell in row:
            number = re.fullmatch(r"-?[\d.]+(e[-+]\d+)?", cell)
            assert number or not cell.lstrip().startswith(tuple("=+-@\t\r")), cell
    assert not TURNING.search(written)
    assert len(rows) == 1 + len(example_document(layers=2)["sites"])


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_has_no_markup_of_others(text: str) -> None:
    plain, written = (
        render_markdown(
            {**example_document(layers=2), "exported": hostile("x")["exported"]}
        ),
        render_markdown(hostile(text)),
    )
    assert not TURNING.search(written)
    outside = re.sub(r"^(`{3,})\n.*?\n\1$", "", written, flags=re.M | re.S)
    bare = re.sub(r"\\.", "", outside)  # what is escaped is text
    assert "<" not in bare
    assert "](" not in bare
    assert "://" not in bare
    assert "`" not in bare
    headings = [line for line in outside.splitlines() if line.startswith("#")]
    tame = [line for line in plain.splitlines() if line.startswith("#")]
    assert len(headings) == len(tame)
    for line in bare.splitlines():  # a table's rows keep their cells
        assert line.count("|") != 1


@pytest.mark.parametrize("text", HOSTILE)
def test_a_pdf_is_made_of_text_alone(text: str) -> None:
    made = render_pdf(hostile(text))
    assert made.startswith(b"%PDF-")
    for active in (b"/JavaScript", b"/JS", b"/Launch", b"/URI", b"/EmbeddedFile"):
        assert active not in made


@pytest.mark.parametrize("text", HOSTILE)
def test_json_keeps_what_was_named_as_it_was(text: str) -> None:
    document = hostile(text)
    assert json.loads(json.dumps(document)) == document


@pytest.mark.parametrize("render", [render_markdown, render_csv, render_pdf])
def test_an_empty_document_makes_a_file(render: Callable[[Any], object]) -> None:
    assert render({})
    assert render(dict.fromkeys(example_document(layers=1)))


# What they say


def test_the_csv_has_every_site_with_its_figures_unrounded() -> None:
    document = example_document()
    rows = list(csv.DictReader(io.StringIO(render_csv(document), newline="")))
    assert len(rows) == len(document["sites"])
    for row, site in zip(rows, document["sites"], strict=True):
        assert (row["site"], row["choice"]) == (site["site"], site["choice"])
        assert float(row["kl_nats"]) == site["kl_nats"]
        assert int(row["bytes"]) == site["bytes"]
        assert row["layer"] == ("" if site["layer"] is None else str(site["layer"]))


def test_markdown_says_what_the_document_says_in_its_order() -> None:
    document = example_document()
    text = render_markdown(document)
    order = [
        "What was asked", "Verdict", "The stack by component", "The Pareto front",
        "Quality on held-out data", "Layers × components", "Why sites stayed high",
        "Stability", "Generation check", "Latency and memory", "Limits and warnings",
        "Provenance, and how to repeat it",
    ]  # fmt: skip
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert headings == order
    for c in document["components"]:
        assert re.search(rf"^\| {c['component']} \| {c['choice']} \|", text, re.M)
    chosen = document["verdict"]["chosen"]
    assert f"| **{chosen} chosen** |" in text
    assert three(document["worst_tokens"][0]["kl_nats"]) in text
    assert document["model"]["sha256"] in text


def test_the_pdfs_plot_is_a_drawing_on_its_own() -> None:
    shown = view(example_document())
    svg = front_svg(shown)
    assert svg is not None
    assert svg.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert "var(" not in svg
    assert front_svg(view({})) is None


def test_every_row_of_the_outline_has_a_cell_for_each_column() -> None:
    tables = [b for b in outline(view(hostile("x"))) if isinstance(b, Table)]
    assert len(tables) > 10
    for table in tables:
        assert {len(row) for row in table.rows} <= {len(table.columns)}
        assert all(n < len(table.columns) for n in table.figures)
        assert {len(row) for row in table.heat} <= {len(table.columns)}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("=1", "'=1"),
        (" =1", "' =1"),
        ("a=1", "a=1"),
        ("", ""),
        ("−1", "−1"),  # a minus sign, and no hyphen
    ],
)
def test_formulas_begin_with_an_apostrophe(text: str, shown: str) -> None:
    assert no_formula(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("attn_qkv", "attn_qkv"),
        ("_a_ *b*", r"\_a\_ \*b\*"),
        ("1. one", r"1\. one"),
        ("- one", r"\- one"),
        ("a - b", "a - b"),
        ("[x](y)", r"\[x\](y)"),
        ("a|b\nc", r"a\|b c"),
        ("<b>&", "&lt;b>&amp;"),
        ("http://x www.x.y a@b", r"http:\/\/x www\.x.y a\@b"),
    ],
)
def test_markdown_is_escaped_where_it_would_be_markup(text: str, shown: str) -> None:
    assert markdown(text) == shown


def test_no_fence_ends_inside() -> None:
    assert fenced("a") == "```\na\n```"
    assert fenced("```\nb").startswith("````\n")
