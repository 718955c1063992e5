"""What may not be imported, checked by importing in a fresh interpreter."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = (
    "torch",
    "transformers",
    "safetensors",
    "transformer_engine",
    "scipy",
    "celery",
)
START_LIMIT_S = 2.0

ASK = f"""
import sys, time
from fastapi.testclient import TestClient
from api.app import create_app
with TestClient(create_app()) as client:
    assert client.get("/livez").status_code == 200
print(time.process_time())
print([name for name in {HEAVY} if name in sys.modules])
"""


@pytest.fixture
def answer(data_dir: Path) -> list[str]:
    """Start the API, ask it once, and return what it printed."""
    asked = [sys.executable, "-W", "ignore", "-c", ASK]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-2:]


def test_the_api_answers_without_torch_within_two_seconds(answer: list[str]) -> None:
    # CPU seconds: what the start needs, however busy the machine is with other tests.
    seconds, loaded = answer
    assert loaded == "[]"
    assert float(seconds) < START_LIMIT_S


def test_init_files_import_nothing() -> None:
    for path in ROOT.glob("*/__init__.py"):
        if path.parts[-2] == "tests":
            continue
        body = ast.parse(path.read_text()).body
        assert all(isinstance(node, ast.Expr) for node in body), path
