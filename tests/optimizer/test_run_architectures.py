"""The whole road for every kind of network, from a folder to the document."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from optimizer.run import optimize
from optimizer.spec import OptimizeSpec
from tests.optimizer import tiny
from tests.optimizer.conftest import Document, quiet

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


@pytest.mark.parametrize("optimized", ["MixtralForCausalLM"], indirect=True)
def test_experts_that_hardly_saw_a_token_are_named(optimized: Document) -> None:
    model = optimized["model"]
    assert model["experts"] > 0
    if model["rare_experts"]:
        assert any("calibration tokens" in w for w in optimized["warnings"])
        assert model["rare_experts"][0]["name"] in "".join(optimized["warnings"])
