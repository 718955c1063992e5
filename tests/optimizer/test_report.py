"""What the report says is what the document holds."""

import copy
import re
from typing import Any

import pytest

from optimizer.report import render_html
from tests.optimizer.example_document import example_document
from tests.optimizer.page import Page, three


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return example_document()


@pytest.fixture(scope="module")
def html(document: dict[str, Any]) -> str:
    return render_html(document)


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_the_verdict_is_the_documents_own_sentence(
    document: dict[str, Any], page: Page
) -> None:
    assert document["verdict"]["sentence"] in page.text["verdict"]
    assert "SLA met" in page.text["verdict"]
    assert "Emulated." in page.text["verdict"]


def test_what_the_numerics_ran_on_is_said_in_a_line() -> None:
    emulated = Page(render_html(example_document())).text
    assert "cpu (AMD EPYC 9B45), emulated, fp32 matmuls" in emulated["provenance"]
    document = example_document()
    document["executed_on"] |= {
        "device": "NVIDIA H100",
        "emulated": False,
        "kernels": "torch._scaled_mm",
        "also": ["NVIDIA L4, some processor"],
    }
    real = Page(render_html(document)).text
    said = "multiplied by NVIDIA H100 (torch._scaled_mm); every other format"
    assert said in real["verdict"]
    said = "NVIDIA H100, run on the device by torch._scaled_mm, beside NVIDIA L4"
    assert said in real["provenance"]


def test_sections_come_in_the_order_in_which_a_reviewer_asks(html: str) -> None:
    order = (
        "asked verdict stack front validation heat reasons stability generation latency "
        "limits provenance sensitivity coverage"
    )
    assert re.findall(r'<section id="(\w+)"', html) == order.split()


def test_each_component_shows_its_choice_counts_and_figures(
    document: dict[str, Any], page: Page
) -> None:
    for c in document["components"]:
        row = page.row("stack", c["component"])
        assert row[1] == c["choice"]
        assert all(f"{n} × {name}" in row[2] for name, n in c["choices"].items())
        assert row[3] == three(c["kl_nats"])
        assert row[5] == f"{three(c['per_token_s'] * 1e6)} µs"


def test_each_point_of_the_front_is_in_the_table_and_in_the_plot(
    document: dict[str, Any], html: str, page: Page
) -> None:
    for p in document["front"]:
        row = page.row("front", p["id"])
        assert row[1] == f"{three(p['per_token_s'] * 1e6)} µs"
        assert row[3] == three(p["kl_nats"])
        assert row[6] == f"{three(p['memory_bytes'] / 1e6)} MB"
        meets = p["per_token_s"] <= document["verdict"]["sla"]["per_token_s"]
        assert row[10] == ("yes" if meets else "no")
        assert f"<title>{p['id']}: " in html
    assert html.count('class="ring"') == 2  # the chosen one, and the legend's
    assert f"chosen: {document['verdict']['chosen']}" in page.text["front"]


def test_each_validated_stack_shows_prediction_measurement_and_intervals(
    document: dict[str, Any], page: Page
) -> None:
    for s in document["validation"]["stacks"]:
        rows = [r for r in page.rows["validation"] if r[0].startswith(s["label"])]
        row = rows[0]
        kl, perplexity = s["kl_nats"], s["perplexity"]
        assert row[1] == three(s["predicted_kl_nats"])
        assert row[2] == f"{three(kl['value'])}{three(kl['low'])} – {three(kl['high'])}"
        assert row[4].startswith(three(perplexity["value"], 4))
        assert (
            f"{three(perplexity['low'], 4)} – {three(perplexity['high'], 4)}" in row[4]
        )
        assert row[6].startswith(three(100 * s["top1_agreement"]["value"]))
        assert row[7:] == [
            three(s["p99_token_kl_nats"]),
            three(s["worst_token_kl_nats"]),
            "0.250 %",
        ]


def test_the_heat_map_reads_without_color(document: dict[str, Any], page: Page) -> None:
    letters = {"bf16": "b", "fp8_e4m3": "8"}
    letters |= {"fp8_e4m3_token": "t", "fp8_e4m3_weight_only": "w"}
    heads = next(r for r in page.rows["heat"] if r[0] == "layer")
    for site in document["sites"]:
        if site["layer"] is not None:
            row = next(r for r in page.rows["heat"] if r[0] == str(site["layer"]))
            assert row[heads.index(site["component"])][0] == letters[site["choice"]]
    # layers.0.ffn_out stayed high: the least of its FP8 choices, in 10⁻³ nats
    site = next(s for s in document["sites"] if s["site"] == "layers.0.ffn_out")
    least = min(a["kl_nats"] for a in site["alternatives"] if "fp8" in a["choice"])
    first = next(r for r in page.rows["heat"] if r[0] == "0")
    assert first[heads.index("ffn_out")] == "b" + three(least * 1e3, 2)


def test_reasons_that_differ_only_in_figures_are_one_group(
    document: dict[str, Any], html: str, page: Page
) -> None:
    high = [s for s in document["sites"] if s["reason"]]
    counts = re.findall(r"<summary><strong>(\d+)</strong> sites?:", html)
    assert sum(map(int, counts)) == len(high)
    assert len(counts) < 8
    assert all(s["reason"] in page.text["reasons"] for s in high)


def test_each_site_shows_the_nats_of_each_choice(
    document: dict[str, Any], page: Page
) -> None:
    for site in document["sites"][::17]:
        row = next(
            r
            for r in page.rows["sensitivity"]
            if r[0] == site["site"] and len(r) == 1 + len(site["alternatives"])
        )
        for cell, a in zip(row[1:], site["alternatives"], strict=True):
            assert ("refused" in cell) == bool(a["refused"])
            assert a["kl_nats"] is None or three(a["kl_nats"]) in cell


def test_other_data_is_shown_with_its_ratio(
    document: dict[str, Any], page: Page
) -> None:
    assert "On other data: code" in page.text["sensitivity"]
    c = document["contrast"]["components"][0]
    row = next(
        r
        for r in page.rows["sensitivity"]
        if r[0] == c["component"] and r[1] == "fp8_e4m3" and len(r) == 5
    )
    assert row[4] == three(c["contrast_kl_nats"] / c["kl_nats"]) + "×"


def test_every_latency_carries_its_basis(document: dict[str, Any], page: Page) -> None:
    stacks = page.rows["latency"][1 : 1 + len(document["validation"]["stacks"])]
    for row in stacks:
        assert all(cell.endswith("modelled") for cell in row[1:5])
    measured = copy.deepcopy(document)
    measured["hardware"]["basis"] = "measured"
    rows = Page(render_html(measured)).rows["latency"]
    assert all(cell.endswith("measured") for cell in rows[1][1:4])


def test_provenance_names_data_model_seed_and_the_command(
    document: dict[str, Any], page: Page
) -> None:
    text = page.text["provenance"]
    for part in (
        document["model"]["sha256"],
        document["data"]["sha256"],
        document["data"]["licence"],
        document["provenance"]["reproduce"],
        "torch 2.13.0",
        "134,515,008",
    ):
        assert part in text
    assert document["request"]["model_path"] not in text  # a path of the workers' own


def test_an_sla_that_was_not_met_says_what_would() -> None:
    document = example_document(layers=2)
    document["verdict"] |= {
        "outcome": "sla_not_met",
        "sentence": "Nothing meets 1 µs.",
        "would_meet": ["An SLA of 30 µs."],
    }
    text = Page(render_html(document)).text["verdict"]
    assert "✗ SLA not met" in text
    assert "An SLA of 30 µs." in text


def test_without_sla_and_contrast_the_page_says_so() -> None:
    document = example_document(layers=2)
    document["contrast"] = None
    document["verdict"]["sla"] = document["request"]["latency_sla"] = {
        "per_token_s": None,
        "first_token_s": None,
    }
    page = Page(render_html(document))
    assert "On other data" not in page.text["sensitivity"]
    assert page.row("front", "p0")[10] == "no SLA"
    assert 'class="limit"' not in render_html(document)


def test_how_predictions_were_corrected_is_said() -> None:
    document = example_document(layers=2)
    document["prediction"] = {
        "measured_stacks": 9,
        "rounds": 2,
        "residual": 0.07,
        "agrees": True,
    }
    document["front"][0]["stability"] = {
        "saturated": 1e-4,
        "fallback": 0.03,
        "worst_token_kl_nats": None,
    }
    page = Page(render_html(document))
    assert "9 whole stacks, measured in 2 rounds, corrected it" in page.text["front"]
    said = " ".join(page.text["front"].split())  # a break is as good as a space
    assert "left out of the correction is predicted within 7.00 % (root" in said
    assert "predicted within its interval" in page.text["front"]
    row = page.row("front", document["front"][0]["id"])
    assert row[8].startswith("3")
    assert row[9] == "—"
    document["prediction"]["agrees"] = False
    assert "go by measured figures" in Page(render_html(document)).text["front"]


def test_what_compensation_gained_is_said() -> None:
    document = example_document(layers=2)
    document["rounding"] = {
        "asked": "compensated",
        "used": "compensated",
        "nearest_kl_nats": {"value": 0.02, "low": 0.018, "high": 0.022},
        "compensated_kl_nats": {"value": 0.01, "low": 0.009, "high": 0.011},
        "gain": {"matrices": 30, "loss": 0.5, "nearest_loss": 2.0},
    }
    text = Page(render_html(document)).text["validation"]
    assert "The FP8 weights of 30 matrices" in text
    assert "fell to 25" in text
    assert "uses the compensated weights" in text
    assert "Static scales" not in text
    document["rounding"]["gain"]["static_scales"] = {"layers.0.ffn_in input": 0.5}
    text = Page(render_html(document)).text["validation"]
    assert "Static scales of 1 tensors" in text
    document["rounding"] = {"asked": "nearest", "used": "nearest"}
    text = Page(render_html(document)).text["validation"]
    assert "Rounding that compensates" not in text
