"""A model, a finished job and a problem: what the tests of the API share."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import structlog
from fastapi.testclient import TestClient
from safetensors.numpy import save_file

from api import console, jobs, options, storage
from api.cli import main
from api.client import Client
from api.db import reading, transaction
from api.models import Job

Json = dict[str, Any]
Refused = Callable[..., Json]
Run = Callable[..., tuple[int, str, str]]  # code, stdout, stderr

BODY: Json = {"model": "tiny", "hardware": "h100", "latency_sla": 0.02}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "vocab_size": 16,
}
REPORT: Json = {
    "schema": "precision.report/1",
    "verdict": {"outcome": "sla_met", "chosen": "p0"},
    "precision_stack": {"attn_qkv": "bf16"},
    "components": [{"component": "attn_qkv", "choice": "bf16"}],
    "layers": [{"layer": 0, "choices": {"attn_qkv": "bf16"}}],
    "sites": [
        {
            "site": "layers.0.attn_qkv",
            "component": "attn_qkv",
            "layer": 0,
            "choice": "bf16",
            "kl_nats": 0.001,
            "reason": "kept",
            "alternatives": [],
        }
    ],
    "front": [{"id": "p0", "per_token_s": 0.01, "kl_nats": 0.001}],
}
SUMMARY: Json = {key: REPORT[key] for key in ("precision_stack", "layers", "front")} | {
    "chosen": REPORT["front"][0]
}


def write_model(folder: Path, **tensors: Any) -> Path:
    """Write a folder that `checkpoint.inspect` takes for a Llama."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    weights = {"lm_head.weight": np.ones((16, 8), dtype=np.float32), **tensors}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(autouse=True)
def _width_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let COLUMNS count where a test sets it: rich reads it once, when it is imported."""
    for terminal in (console.out, console.err):
        monkeypatch.setattr(terminal, "_width", None)


@pytest.fixture
def tiny(data_dir: Path) -> Path:
    """A shared model, there before the service starts."""
    return write_model(data_dir / "models" / "tiny")


@pytest.fixture
def job_id(tiny: Path, client: TestClient) -> str:
    """A queued job."""
    response = client.post("/v1/optimize", json=BODY)
    assert response.status_code == 202, response.text
    return str(response.json()["id"])


@pytest.fixture
def done(job_id: str) -> str:
    """A job that succeeded, with its artifacts."""
    files = {
        "report.json": json.dumps(REPORT).encode(),
        "report.html": b"<!doctype html><title>report</title>",
    }
    with transaction() as session:
        claim = jobs.claim(session, job_id, "worker-1")
        assert claim is not None
        stored = [storage.put(job_id, 1, name, data) for name, data in files.items()]
        jobs.succeed(session, claim, "sla_met", SUMMARY, stored)
    return job_id


@pytest.fixture
def refused() -> Refused:
    """Check that an answer is a problem document, and return it."""

    def check(
        response: httpx.Response, status: int, code: str, pointer: str = "-"
    ) -> Json:
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/problem+json"
        problem: Json = response.json()
        assert problem["status"] == status
        assert problem["code"] == code, problem
        assert problem["title"]
        assert problem["detail"]
        assert problem["type"].startswith("https://")
        assert problem["request_id"] == response.headers["x-request-id"]
        assert problem["instance"] == response.request.url.path
        if pointer != "-":
            assert pointer in [field.get("pointer") for field in problem["errors"]], (
                problem
            )
        return problem

    return check


def jobs_in_database() -> int:
    """Count rows, of all tenants."""
    with reading() as session:
        return session.query(Job).count()


@pytest.fixture
def nothing_is_queued(
    tiny: Path, client: TestClient, bells: list[str]
) -> Iterator[None]:
    """Whatever is sent: no job comes of it, and the service goes on."""
    yield
    assert jobs_in_database() == 0
    assert bells == []
    assert client.get("/livez").status_code == 200


@pytest.fixture
def precision(
    client: TestClient,
    key: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Run]:
    """Run `precision` as a shell 80 columns wide would; gives code, stdout, stderr."""

    def serve(request: httpx.Request) -> httpx.Response:
        answer = client.request(
            request.method,
            str(request.url),
            headers=dict(request.headers),
            content=request.content,
        )
        return httpx.Response(answer.status_code, content=answer.content)

    def connect(url: str | None, given: str | None, data_dir: Path) -> Client:
        transport = httpx.MockTransport(serve)
        return Client("http://testserver", key, transport=transport)

    monkeypatch.setattr(options, "connect", connect)
    monkeypatch.setenv("COLUMNS", "80")
    # The service's own log goes to stdout, which is what we test.
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        printed = capsys.readouterr()
        return int(end.value.code or 0), printed.out, printed.err

    yield run
    structlog.reset_defaults()
