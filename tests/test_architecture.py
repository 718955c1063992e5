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
import pathlib, sys, time
from fastapi import FastAPI
from fastapi.testclient import TestClient
with TestClient(FastAPI()) as client:
    assert client.get("/openapi.json").status_code == 200
pathlib.Path(sys.argv[1]).write_text(f"{time.process_time()}\\n")
"""
ASK = f"""
import pathlib, sys, time
from fastapi.testclient import TestClient
from api.app import create_app
with TestClient(create_app()) as client:
    assert client.get("/livez").status_code == 200
loaded = [name for name in {HEAVY} if name in sys.modules]
pathlib.Path(sys.argv[1]).write_text(f"{{time.process_time()}}\\n{{loaded}}\\n")
"""


def told(program: str, told_in: Path) -> list[str]:
    """Run a program, and return the lines that it wrote into the file `told_in`.

    A file, since threads that are still at work when the program ends log to its output.
    """
    asked = [sys.executable, "-W", "ignore", "-c", program, str(told_in)]
    subprocess.run(asked, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return told_in.read_text().splitlines()


def test_the_api_answers_without_torch_within_two_seconds(
    data_dir: Path, tmp_path: Path
) -> None:
    # CPU seconds: what the start needs, whoever waits for the machine. They stretch
    # where a core's other thread is busy: one look of three counts, and what an
    # application without anything needs right after it stretches with it.
    least = []
    for _ in range(3):
        seconds, loaded = told(ASK, tmp_path / "asked")
        assert loaded == "[]"
        (bare,) = told(BARE, tmp_path / "bare")
        limit = max(START_LIMIT_S, START_LIMIT_BARE * float(bare))
        least.append(float(seconds) / limit)
    assert min(least) < 1.0


def test_init_files_import_nothing() -> None:
    for path in ROOT.glob("*/__init__.py"):
        if path.parts[-2] == "tests":
            continue
        body = ast.parse(path.read_text()).body
        assert all(isinstance(node, ast.Expr) for node in body), path
