"""The monitor where FSDP cuts parameters and gradients up: two processes, gloo."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.training.two_layers import TwoLayers, batch, by_hand, by_hand_norm

ROOT = Path(__file__).parents[2]
CLOSE = 64 * 2.0**-24
PARTLY = ("output_amax", "output_nonfinite")  # of the samples of one process


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("shards")
    command = [sys.executable, "-m", "tests.training.two_shards"]
    started = [
        subprocess.Popen([*command, str(rank), str(folder)], cwd=ROOT)
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=90) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    return [json.loads((folder / f"said.{rank}.json").read_text()) for rank in range(2)]


def test_a_part_is_told_as_the_whole(said: list[dict[str, Any]]) -> None:
    hand = by_hand(TwoLayers(), batch())
    clipped = 1.0 / by_hand_norm(hand)
    first = said[0]["readings"][0]
    for name, gradient in hand.items():
        norm = clipped * float((gradient**2).sum() ** 0.5)
        assert first[name]["gradient_norm"] == pytest.approx(norm, rel=CLOSE)
    # Of six columns one is zero; of the five others one underflows, and moves nothing.
    assert (first["first"]["zero_rate"], first["second"]["zero_rate"]) == (1 / 6, 0)
    assert (first["first"]["bf16_underflow"], first["first"]["unchanged"]) == (0.2, 0.2)


def test_both_processes_say_the_same(said: list[dict[str, Any]]) -> None:
    one, other = (
        [
            {
                (layer, figure): str(value)  # NaN, too
                for layer, figures in reading.items()
                for figure, value in figures.items()
                if figure not in PARTLY
            }
            for reading in each["readings"]
        ]
        for each in said
    )
    assert one == other


def test_what_is_nan_on_one_process_is_counted_by_both(
    said: list[dict[str, Any]],
) -> None:
    for each in said:
        layers = each["readings"][1]
        assert {n: layer["nonfinite"] for n, layer in layers.items()} == {
            "first": 5 * 6,
            "second": 3 * 5,
        }
    assert said[0]["heard"] == said[0]["rung"] == said[1]["rung"] > 0
    assert said[1]["heard"] == 0
