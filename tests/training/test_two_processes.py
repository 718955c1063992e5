"""The monitor and the scheduler under DistributedDataParallel, two processes, gloo."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.training.two_layers import TwoLayers, batch, by_hand

ROOT = Path(__file__).parents[2]
CLOSE = 64 * 2.0**-24


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.training.two_processes", str(r), str(folder)],
            cwd=ROOT,
        )
        for r in range(2)
    ]
    try:
        assert [process.wait(timeout=90) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    return [json.loads((folder / f"said.{r}.json").read_text()) for r in range(2)]


def test_both_see_the_gradient_of_the_whole_batch(said: list[dict[str, Any]]) -> None:
    hand = by_hand(TwoLayers(), batch())
    for name, gradient in hand.items():
        norm = float((gradient**2).sum() ** 0.5)
        assert said[0]["norms"][name] == pytest.approx(norm, rel=CLOSE)
    assert said[0]["norms"] == said[1]["norms"]
    assert said[0]["zeros"] == said[1]["zeros"] == {"first": 1 / 6, "second": 0.0}


def test_the_first_process_rings_for_both(said: list[dict[str, Any]]) -> None:
    assert said[0]["heard"] == said[0]["rung"] > 0
    assert said[1]["heard"] == 0


def test_what_is_nan_on_one_process_switches_both(said: list[dict[str, Any]]) -> None:
    assert [s["precisions"] for s in said] == [["fp16", "fp16", "fp16", "bf16"]] * 2
    assert [s["skipped"] for s in said] == [1, 1]
