"""What may not be imported, checked by importing in a fresh interpreter."""

import ast
import subprocess
import sys
from pathlib import Path

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
START_LIMIT_BARE = 6.0  # or times what an application without anything needs

BARE = """
import time
from fastapi import FastAPI
from fastapi.testclient import TestClient
with TestClient(FastAPI()) as client:
    assert client.get("/openapi.json").status_code == 200
print(time.process_time())
"""
ASK = f"""
import sys, time
from fastapi.testclient import TestClient
from api.app import create_app
with TestClient(create_app()) as client:
    assert client.get("/livez").status_code == 200
print(time.process_time())
print([name for name in {HEAVY} if name in sys.modules])
"""


def printed(program: str) -> list[str]:
    """Run a program, and return the lines that it printed but for its log, in JSON.

    A thread that is still at work when the program ends may log the last line.
    """
    asked = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if not line.startswith("{")]


def test_the_api_answers_without_torch_within_two_seconds(data_dir: Path) -> None:
    # CPU seconds: what the start needs, whoever waits for the machine. They stretch
    # where a core's other thread is busy: the least of three looks counts, and what an
    # application without anything needs stretches with it.
    looks = [printed(ASK)[-2:] for _ in range(3)]
    assert [loaded for _, loaded in looks] == ["[]"] * 3
    bare = min(float(printed(BARE)[-1]) for _ in range(3))
    limit = max(START_LIMIT_S, START_LIMIT_BARE * bare)
    assert min(float(seconds) for seconds, _ in looks) < limit


def test_init_files_import_nothing() -> None:
    for path in ROOT.glob("*/__init__.py"):
        if path.parts[-2] == "tests":
            continue
        body = ast.parse(path.read_text()).body
        assert all(isinstance(node, ast.Expr) for node in body), path
