"""What a real engine takes for a checkpoint, asked of an environment of its own."""

import json
import os
from pathlib import Path

import pytest

from optimizer import engines
from optimizer.engines import served_seconds
from optimizer.errors import HardwareError
from optimizer.spec import Workload

# As `make vllm` makes it.
MADE = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
VLLM = os.environ.get("PRECISION_VLLM_PYTHON") or (str(MADE) if MADE.exists() else "")
SAID = {
    "per_token_s": 0.016,
    "first_token_s": 0.4,
    "spread": 0.02,
    "steps": 189,
    "engine": "vllm",
    "version": "0.32.0",
}


def python(folder: Path, script: str) -> Path:
    """Return a program that stands for another environment's Python."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def test_the_line_of_json_is_what_counts(tmp_path: Path) -> None:
    script = f"echo loading; echo \"$@\" > {tmp_path}/asked; echo '{json.dumps(SAID)}'; echo bye"
    found = served_seconds(python(tmp_path, script), Path("/m/tiny"), Workload(2, 8, 4))
    assert found.per_token_s == 0.016
    assert (found.engine, found.version) == ("vllm", "0.32.0")
    script_path, folder, sizes = (tmp_path / "asked").read_text().split(" ", 2)
    assert Path(script_path).is_file()
    assert folder == "/m/tiny"
    assert json.loads(sizes)["batch_size"] == 2


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'ValueError: no such kernel' >&2; exit 1", "no such kernel"),
        ("exit 0", "it said nothing"),
    ],
)
def test_the_engines_last_words_are_the_reason(
    script: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(HardwareError, match=f"does not serve tiny: .*{why}"):
        served_seconds(python(tmp_path, script), Path("/m/tiny"), Workload())


def test_an_engine_that_is_not_there_or_never_ends_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HardwareError, match="was not run"):
        served_seconds(tmp_path / "none", Path("/m/tiny"), Workload())
    monkeypatch.setattr(engines, "LIMIT_S", 0.1)
    with pytest.raises(HardwareError, match="was not run"):
        served_seconds(python(tmp_path, "exec sleep 5"), Path("/m/tiny"), Workload())


@pytest.mark.slow
@pytest.mark.skipif(not VLLM, reason="PRECISION_VLLM_PYTHON names no vLLM environment")
def test_vllm_serves_the_demo_model() -> None:
    folder = Path("var/models/smollm2-135m-instruct").resolve()
    found = served_seconds(Path(VLLM), folder, Workload(1, 64, 16))
    assert found.engine == "vllm"
    assert found.per_token_s > 0
    assert found.first_token_s is not None
    assert found.first_token_s > 0
