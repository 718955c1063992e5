"""The whole road for every kind of network, from a folder to the document."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from optimizer.casts import CastCost, Casts
from optimizer.one_pass import casts_of_pass
from optimizer.report import render_html
from optimizer.run import optimize
from optimizer.spec import OptimizeSpec
from optimizer.stack import Component, Site, choice_named
from tests.optimizer import tiny
from tests.optimizer.conftest import Document, quiet
from tests.optimizer.test_report_schema import faults

ARCHITECTURES = (
    "MixtralForCausalLM",
    "GPTNeoXForCausalLM",
    "FalconForCausalLM",
    "Gemma2ForCausalLM",
    "BertForMaskedLM",
)


@pytest.fixture
def optimized(
    tmp_path: Path, spec: OptimizeSpec, request: pytest.FixtureRequest
) -> Document:
    """A job on a tiny network of the architecture, with the tokenizer of the others."""
    folder = tmp_path / "model"
    network = tiny.network(request.param)
    network.resize_token_embeddings(272)  # what the tokenizer of bytes needs
    network.save_pretrained(folder)
    for file in Path(spec.model_path).glob("tokenizer*"):
        shutil.copy(file, folder)
    return optimize(replace(spec, model_path=str(folder)), quiet)


@pytest.mark.slow
@pytest.mark.parametrize("optimized", ARCHITECTURES, indirect=True)
def test_a_job_runs_to_its_document(optimized: Document) -> None:
    assert optimized["model"]["coverage_percent"] > 95
    assert len(optimized["front"]) >= 3
    for site in optimized["sites"]:
        usable = [a for a in site["alternatives"] if a["refused"] is None]
        assert any(a["kl_nats"] > 0 for a in usable if a["choice"] != "fp32"), site
    assert faults(optimized) == []
    assert (optimized["generation"] is None) == (
        "Masked" in optimized["model"]["architecture"]
    )


@pytest.mark.parametrize("optimized", ["MixtralForCausalLM"], indirect=True)
def test_experts_that_hardly_saw_a_token_are_named(optimized: Document) -> None:
    model = optimized["model"]
    assert model["experts"] > 0
    if model["rare_experts"]:
        assert any("calibration tokens" in w for w in optimized["warnings"])
        assert model["rare_experts"][0]["name"] in "".join(optimized["warnings"])


@pytest.mark.parametrize("optimized", ["BertForMaskedLM"], indirect=True)
def test_an_encoder_is_timed_by_its_pass_and_has_no_perplexity(
    optimized: Document,
) -> None:
    validation = optimized["validation"]
    assert validation["reference"]["perplexity"] is None
    assert all(s["perplexity"] is None for s in validation["stacks"])
    assert all(s["kl_nats"]["value"] >= 0 for s in validation["stacks"])
    for point in (*optimized["front"], *validation["stacks"], *optimized["components"]):
        assert point["per_token_s"] == point["first_token_s"]
    assert "for a batch" in optimized["verdict"]["sentence"]
    assert any("generates nothing" in said for said in optimized["limits"])
    assert 'class="n">—</td>' in render_html(optimized)  # the report goes without


def test_what_an_encoder_pays_for_a_cast_is_of_the_pass() -> None:
    pair = Site(0, Component.NORMS), Site(0, Component.FFN_IN)
    choice = choice_named(Component.NORMS, "bf16")
    found = casts_of_pass(Casts((pair,), lambda *_: CastCost(1.0, 5.0)))
    assert found.cost_of(pair, choice, choice) == CastCost(5.0, 5.0)
