"""Every report is what its schema says, and the same job makes the same report again."""

import copy
import json
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from optimizer.document import SCHEMA
from optimizer.report import render_html
from optimizer.report_csv import render_csv
from optimizer.report_markdown import render_markdown
from optimizer.report_pdf import render_pdf
from optimizer.seal import digest, sealed
from optimizer.spec import OptimizeSpec
from tests.optimizer.conftest import Document, quiet

SLOW = pytest.mark.slow


@cache
def validator() -> Draft202012Validator:
    schemas = resources.files("optimizer").joinpath("data", "schemas")
    found = json.loads(schemas.joinpath("report-1.json").read_text("utf-8"))
    Draft202012Validator.check_schema(found)
    return Draft202012Validator(found)


def faults(document: Document) -> list[str]:
    found = validator().iter_errors(document)
    return [f"{'/'.join(map(str, e.absolute_path))}: {e.message[:200]}" for e in found]


@pytest.mark.parametrize(
    "hardware",
    ["h100", "t4", *(pytest.param(h, marks=SLOW) for h in ("l4", "mi300x", "local"))],
)
def test_every_report_fits_the_schema_of_its_version(
    document_of: Callable[[str], Document], hardware: str
) -> None:
    document = document_of(hardware)
    assert document["schema"] == SCHEMA == "precision.report/1"
    assert faults(document) == []
    assert faults(sealed(document)) == []


def test_a_prompt_that_is_too_long_to_be_run_fits_too(
    document_of: Callable[[str], Document],
) -> None:
    run = {"per_token_s": 0.1, "first_token_s": None, "spread": 0.1, "steps": 8}
    by = {"engine": "torch", "version": "2", "threads": 1}
    document = {**document_of("h100"), "runs": [{"label": "chosen", **run, **by}]}
    assert faults(document) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("verdict", "outcome"), "fine"),
        (("model", "sha256"), "0" * 63),
        (("sites", 0, "choice"), "<b>"),
        (("front", 0, "stack", "lm_head"), 8),
        (("validation", "stacks", 0, "kl_nats"), 0.5),
        (("stability", "fallback"), 1.5),
        (("generation", "new_tokens"), -1),
        (("note",), "a member of a later version"),
    ],
)
def test_what_is_no_report_does_not_fit(
    document_of: Callable[[str], Document], path: tuple[Any, ...], value: object
) -> None:
    document = copy.deepcopy(document_of("h100"))
    inside: Any = document
    for step in path[:-1]:
        inside = inside[step]
    inside[path[-1]] = value
    assert len(faults(document)) == 1


def test_no_section_may_be_missing(document_of: Callable[[str], Document]) -> None:
    document = {**document_of("h100"), "sites": [], "front": []}  # the long ones
    document["statistics"] = {**document["statistics"], "places": []}
    for name in document:
        less = {k: v for k, v in document.items() if k != name}
        assert faults(less) == [f": {name!r} is a required property"]


def test_the_same_job_makes_the_same_bytes_in_every_form(
    document_of: Callable[[str], Document], spec: OptimizeSpec
) -> None:
    from optimizer.run import optimize

    first, second = document_of("h100"), optimize(spec, quiet)
    assert json.dumps(sealed(first)) == json.dumps(sealed(second))
    for render in (render_html, render_markdown, render_csv, render_pdf):
        assert render(sealed(first)) == render(sealed(second))


def test_a_digest_is_of_what_is_said_and_not_of_its_order() -> None:
    assert digest({"a": 1, "b": [2, 3]}) == digest({"b": [2, 3], "a": 1})
    assert digest({"a": 1}) != digest({"a": 1.0})
    assert digest({"a": [1, 2]}) != digest({"a": [2, 1]})
    assert digest(sealed({"a": 1})) == digest({"a": 1})
