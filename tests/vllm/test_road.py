"""A job for this machine and the engine vllm, over HTTP: vLLM serves what it exports.

`PRECISION_VLLM_PYTHON` is that of `make vllm`; a worker's sandboxed process starts it.
"""

import math
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from api.client import FINAL
from optimizer.export_scheme import MATRICES
from optimizer.stack import Site
from tests.service import BODY, VOCAB, Service, byte_tokenizer, eventually, service
from tests.vllm.test_served import PYTHON

pytestmark = [pytest.mark.slow, pytest.mark.service, pytest.mark.timeout(900)]

WORKLOAD = {"batch_size": 2, "prompt_tokens": 48, "output_tokens": 8}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A small model whose heads are as vLLM's CPU kernels take them."""
    folder = tmp_path / "models" / "tiny"
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer(folder)
    return tmp_path


def test_vllm_serves_the_stack_and_its_seconds_are_in_the_report(
    data_dir: Path,
) -> None:
    if not PYTHON.is_file():
        pytest.skip("`make vllm` makes the environment that has it")
    body = {**BODY, "hardware": "local", "engine": "vllm", "workload": WORKLOAD}
    body |= {"latency_sla": 10.0, "exports": ["compressed_tensors"]}
    environment = {"PRECISION_VLLM_PYTHON": str(PYTHON)}
    with service(data_dir, environment=environment) as running:
        report = report_of(running, body)
        assert_served(report)
        between = [r["per_token_s"] for r in report["runs"] if "chosen" in r["label"]]
        target = (
            math.prod(between) ** 0.5
        )  # torch takes more and vLLM less, or the other way
        again = report_of(running, body | {"latency_sla": target})
    assert_served(again)
    (took,) = (r for r in again["runs"] if r["label"] == "chosen_served")
    missed = took["per_token_s"] > again["verdict"]["sla"]["per_token_s"]
    assert (again["verdict"]["outcome"] == "sla_not_met") is missed


def report_of(running: Service, body: dict[str, Any]) -> dict[str, Any]:
    job = running.client.job(running.client.optimize(body)["id"])
    job = eventually(
        lambda: (
            ended
            if (ended := running.client.job(job["id"])) and ended["status"] in FINAL
            else None
        ),
        600.0,
    )
    assert job["status"] == "succeeded", job["error"]
    return running.client.report(job["id"])


def assert_served(report: dict[str, Any]) -> None:
    exported = report["exported"]
    assert exported["refused"] == []
    served = exported["checkpoint"]["served_seconds"]
    assert "error" not in served, served
    assert served["engine"] == "vllm"
    assert served["version"].startswith("0.32")
    assert served["per_token_s"] > 0
    assert served["first_token_s"] > 0
    (row,) = (r for r in report["runs"] if r["label"] == "chosen_served")
    assert row == {"label": "chosen_served", **served}
    said = f"per token under vllm {served['version']} (measured; in torch "
    assert said in report["verdict"]["sentence"]
    assert any(f"vllm {served['version']} served" in one for one in report["limits"])
    chosen = next(p for p in report["front"] if p["id"] == report["verdict"]["chosen"])
    for site, choice in chosen["stack"].items():
        if Site.parse(site).component in MATRICES:
            assert choice == "bf16", site
