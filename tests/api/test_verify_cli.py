"""`precision verify`, `reproduce` and `report-key`, against the real API and without it."""

import json
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from api import signatures
from optimizer.spec import OptimizeSpec
from tests.api.test_cli import Run, answer, job_id, optimizer, precision, site

__all__ = ["optimizer", "precision", "site"]  # fixtures

ASK = ("optimize", "tiny", "--hardware", "h100")


@pytest.fixture
def true(optimizer: ModuleType) -> dict[str, Any]:
    """A report of what was asked for, as often as it is asked; to be changed."""
    document = answer("sla_met")
    document["provenance"]["request"] = {"model": "tiny", "hardware": "h100"}

    def optimize(spec: OptimizeSpec, *others: object) -> dict[str, Any]:
        document["model"] |= {"name": spec.model, "sha256": spec.model_sha256}
        return document

    optimizer.optimize = optimize  # type: ignore[attr-defined]
    return document


def report_of(precision: Run, folder: Path) -> Path:
    _, _, told = precision(*ASK)
    report = folder / "report.json"
    assert precision("report", job_id(told), "--out", str(report))[0] == 0
    return report


def test_a_report_verifies_until_a_digit_is_changed(
    site: Path, true: dict[str, Any], precision: Run, tmp_path: Path
) -> None:
    report = report_of(precision, tmp_path)
    code, out, error = precision("verify", str(report))
    assert (code, "verified" in out) == (0, True), error
    text = report.read_text()
    assert text.count('"tokens": 2048') > 0
    report.write_text(text.replace('"tokens": 2048', '"tokens": 2049', 1))
    code, out, error = precision("verify", str(report))
    assert (code, out) == (1, "")
    assert "it was changed" in " ".join(error.split())


def test_the_kept_key_needs_no_service(
    site: Path, true: dict[str, Any], precision: Run, tmp_path: Path
) -> None:
    report, pem = report_of(precision, tmp_path), tmp_path / "key.pem"
    assert precision("report-key", "--out", str(pem))[0] == 0
    (site / "address").unlink()  # nobody is there to be asked
    assert precision("verify", str(report))[0] == 1
    code, out, _ = precision("verify", str(report), "--public-key", str(pem), "--json")
    assert code == 0
    said = json.loads(out)
    assert said["verified"] is True
    assert said["sha256"] == json.loads(report.read_text())["integrity"]["sha256"]
    pem.write_text("no key")
    code, _, error = precision("verify", str(report), "--public-key", str(pem))
    assert (code, "BEGIN PUBLIC KEY" in error) == (1, True)


def test_a_report_that_is_not_there_is_named(precision: Run, tmp_path: Path) -> None:
    missing = tmp_path / "none.json"
    code, _, error = precision("verify", str(missing), "--public-key", str(missing))
    assert (code, "none.json" in error) == (1, True)


def test_the_same_again_has_the_same_digest(
    site: Path, true: dict[str, Any], precision: Run, tmp_path: Path
) -> None:
    report = report_of(precision, tmp_path)
    code, out, error = precision("reproduce", str(report))
    assert code == 0, error
    digest = json.loads(report.read_text())["integrity"]["sha256"]
    assert f"the same, byte by byte: sha256 {digest}" in out


def test_other_figures_are_named_and_other_machines_are_not_one(
    site: Path, true: dict[str, Any], precision: Run, tmp_path: Path
) -> None:
    report = report_of(precision, tmp_path)
    true["executed_on"]["threads"] = 64
    code, out, _ = precision("reproduce", str(report))
    assert (code, "every figure is the same" in out) == (0, True)
    assert "made elsewhere or by another build: executed_on" in out
    true["front"][0]["kl_nats"] = 0.5
    code, out, _ = precision("reproduce", str(report))
    assert code == 1
    assert "1 figures differ" in out
    assert "/front/0/kl_nats" in out
    code, out, _ = precision("reproduce", str(report), "--json")
    told = json.loads(out)
    assert (code, told["reproduced"]) == (1, False)
    assert [d["again"] for d in told["differences"] if not d["surroundings"]] == [0.5]


def test_other_weights_under_the_name_are_refused_before_anything_runs(
    site: Path, true: dict[str, Any], precision: Run, tmp_path: Path
) -> None:
    report = report_of(precision, tmp_path)
    document = json.loads(report.read_text())
    document["model"]["sha256"] = "0" * 64
    report.write_text(json.dumps(document))
    code, _, error = precision("reproduce", str(report))
    assert (code, "the service has another 'tiny'" in error) == (1, True)
    document["model"]["name"] = "nobody"
    report.write_text(json.dumps(document))
    code, _, error = precision("reproduce", str(report))
    assert (code, "no model 'nobody'" in error) == (1, True)
    del document["provenance"]["request"]
    report.write_text(json.dumps(document))
    code, _, error = precision("reproduce", str(report))
    assert (code, "does not say what was asked" in error) == (1, True)


def test_every_form_comes_by_its_name(
    site: Path, true: dict[str, Any], precision: Run, tmp_path: Path
) -> None:
    _, _, told = precision(*ASK)
    job = job_id(told)
    for form, start in (
        ("json", b"{"),
        ("html", b"<!DOCTYPE html>"),
        ("md", b"# Precision report"),
        ("csv", b"site,layer,component"),
        ("pdf", b"%PDF-"),
    ):
        to = tmp_path / form
        assert precision("report", job, "--format", form, "--out", str(to))[0] == 0
        assert to.read_bytes().startswith(start)
    code, _, error = precision("report", job, "--format", "docx")
    assert (code, "json, html, md, csv, pdf" in " ".join(error.split())) == (1, True)


def test_signing_says_when() -> None:
    at = datetime(2026, 3, 1, 23, 59, 59, 999_999, tzinfo=UTC)
    signed = signatures.sign({"schema": "precision.report/1"}, at)
    assert signed["integrity"]["signed_at"] == "2026-03-01T23:59:59Z"
