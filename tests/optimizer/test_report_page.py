"""The report is one page that holds together, whatever is in the document."""

import copy
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from optimizer.report import render_html
from optimizer.report_script import policy, script
from tests.optimizer.example_document import example_document
from tests.optimizer.page import Page


def page_policy(html: str) -> str:
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert found is not None
    return found[1]


SIZE_LIMIT = 1_500_000  # bytes; a mail attachment that nobody notices


@pytest.fixture(scope="module")
def html() -> str:
    return render_html(example_document())


def test_the_page_is_one_file_that_loads_nothing(html: str) -> None:
    page = Page(html)
    assert html.count("<script") == 1
    assert f"<script>{script()}</script>" in html  # the one that the policy names
    assert policy() in page_policy(html)
    assert "default-src &#39;none&#39;" in html or "default-src 'none'" in html
    assert not re.search(r"url\(|@import", html)
    for tag, name, value in page.attributes:
        assert name != "src"
        if name in ("href", "xlink:href", "data", "action"):
            assert value.startswith(("#", "data:,")), (tag, value)
        assert not name.startswith("on")
    ids = {value for _, name, value in page.attributes if name == "id"}
    links = {v[1:] for _, name, v in page.attributes if name == "href" and v[0] == "#"}
    assert links <= ids


def test_the_largest_open_model_fits_the_size_limit() -> None:
    # 126 layers: Llama 3.1 405B; half the limit is left for longer names
    assert len(render_html(example_document(layers=126)).encode()) < SIZE_LIMIT


@pytest.mark.slow
def test_same_document_same_bytes_whatever_the_hash_seed(html: str) -> None:
    code = (
        "import hashlib; from optimizer.report import render_html;"
        "from tests.optimizer.example_document import example_document;"
        "print(hashlib.sha256(render_html(example_document()).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
    assert render_html(example_document()) == html


def test_rendering_leaves_the_document_alone() -> None:
    document = example_document()
    before = copy.deepcopy(document)
    render_html(document)
    assert document == before


HOSTILE = "<script>alert(1)</script>\"'&\u202egnp.exe\u2066\x00\ud800"


def test_hostile_names_show_as_text_and_turn_nothing_around() -> None:
    document = example_document(layers=2)
    document["model"]["name"] = document["request"]["model"] = HOSTILE
    document["data"]["distribution"] = document["contrast"]["distribution"] = HOSTILE
    document["model"]["unrecognized"][0]["module"] = HOSTILE
    document["sites"][1]["reason"] = HOSTILE
    document["sites"][1]["choice"] = "bf16"
    document["sites"][2]["site"] = HOSTILE
    document["front"][0]["stack"] = {HOSTILE: HOSTILE}
    document["verdict"]["sentence"] = document["verdict"]["outcome"] = HOSTILE
    document["provenance"]["versions"] = {HOSTILE: HOSTILE}
    html = render_html(document)
    page = Page(html)
    assert html.count("<script") == html.count(f"<script>{script()}</script>") == 1
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00\ud800]", html)
    assert "<script>alert(1)</script>\"'&⟨U+202E⟩gnp.exe" in page.text["coverage"]
    html.encode()  # no lone surrogate is left


def emptied(value: Any, to: Any) -> Any:
    if isinstance(value, dict):
        return {k: emptied(v, to) for k, v in value.items()}
    if isinstance(value, list):
        return [emptied(v, to) for v in value]
    return (
        to if isinstance(value, int | float) and not isinstance(value, bool) else value
    )


def holes(value: Any) -> Iterator[str]:
    """Set each field to None, one after the other; remove those that hold others."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    for key, child in items:
        value[key] = None
        yield f"{key}=None"
        if isinstance(value, dict) and isinstance(child, dict | list):
            del value[key]
            yield f"no {key}"
        value[key] = child
        if isinstance(child, dict | list):
            yield from holes(child)


def sound(html: str) -> None:
    text = " ".join(Page(html).text.values())
    assert not re.search(r"\b(None|nan|NaN|inf|Undefined|undefined)\b", text)


@pytest.mark.slow
def test_any_field_may_be_missing_or_null() -> None:
    document = example_document(layers=1)
    document["sites"] = document["sites"][2:3] + document["sites"][-1:]
    for name in ("sites", "front", "components"):
        del document[name][2:]
    for site in document["sites"]:
        del site["alternatives"][:-1]
    for front in document["front"]:
        front["stack"] = {"lm_head": "bf16"}
    del document["validation"]["stacks"][2:], document["contrast"]["components"][1:]
    for hole in holes(document):
        try:
            sound(render_html(document))
        except Exception as error:
            raise AssertionError(hole) from error


@pytest.mark.parametrize("value", [None, math.nan, math.inf, 0, -1.0])
def test_no_figure_at_all_still_makes_a_page(value: object) -> None:
    sound(render_html(emptied(example_document(layers=2), value)))


def test_an_empty_document_makes_a_page() -> None:
    sound(render_html({}))
