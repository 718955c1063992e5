"""A training is probed by the real service: queued, walled in, computed, published."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli import app
from tests.service import service, tiny_model

pytestmark = [pytest.mark.service, pytest.mark.slow]
TASK = '{"type": "pretrain", "candidates": ["bf16", "fp8_current"]}'
HOW = ["--steps", "8", "--batch-size", "4", "--sequence-tokens", "16", "--lr", "0.003"]


def test_a_probe_ends_with_a_report_and_configurations(tmp_path: Path) -> None:
    data_dir, out = tmp_path / "data", tmp_path / "out"
    tiny_model(data_dir / "models" / "tiny")
    asked = ["optimize", "tiny", "--hardware", "h100", "--task", TASK, *HOW]
    with service(data_dir) as running:
        where = ["--data-dir", str(data_dir)]
        done = CliRunner().invoke(app, [*asked, *where, "--out", str(out)])
        assert done.exit_code == 0, done.output
        file = str(out / "report.json")
        verified = CliRunner().invoke(app, ["verify", file, *where])
        assert verified.exit_code == 0, verified.output
        again = CliRunner().invoke(app, ["reproduce", file, *where])
        assert again.exit_code == 0, again.output
        assert "the same, byte by byte" in again.stdout
        _, first = running.client.jobs()
        job = running.client.job(first["id"])
        document = running.client.report(job["id"])
        forms = ("md", "csv", "pdf")
        said = {form: running.client.report_as(job["id"], form) for form in forms}
    how = {"steps": 8, "batch_size": 4, "sequence_tokens": 16, "learning_rate": 0.003}
    assert how.items() <= job["request"]["training"].items()
    assert job["outcome"] == document["verdict"]["outcome"] == "recommended"
    assert said["md"].startswith(b"# Training report: tiny on ")
    assert said["csv"].startswith(b"candidate,round,layer,")
    assert said["pdf"].startswith(b"%PDF-")
    assert "fp8_current" in done.stdout
    assert "Train in fp8_current" in " ".join(done.stdout.split())
    written = {path.name for path in out.iterdir()}
    assert written >= {
        "report.json",
        "report.html",
        "report.md",
        "report.pdf",
        "layers.csv",
        "training_stack.json",
        "training_arguments.json",
        "deepspeed.json",
        "fsdp.json",
        "torchao_float8.py",
    }
