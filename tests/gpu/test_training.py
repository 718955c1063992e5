"""A probe's runs on a GPU beside the emulation of them."""

from pathlib import Path

import pytest
import torch

from optimizer import scaled_mm
from optimizer.pieces import Memory
from optimizer.training.candidates import CANDIDATES, Candidate
from optimizer.training.place import executed_on
from optimizer.training.train_data import FIRST
from optimizer.training.work import TrainingWork
from tests.service import tiny_model
from tests.training.test_job import asked

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def losses(folder: Path, candidate: Candidate, where: str) -> list[float]:
    work = TrainingWork(asked(folder), Memory())
    work.where = torch.device(where)
    (figures,) = work([(candidate, FIRST)])
    assert figures.stopped is None
    return figures.losses


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8_current", "fp8_delayed"])
def test_a_gpu_trains_as_the_emulation_does(tmp_path: Path, name: str) -> None:
    folder = tiny_model(tmp_path / "tiny")
    there = losses(folder, CANDIDATES[name], "cuda")
    here = losses(folder, CANDIDATES[name], "cpu")
    assert there == pytest.approx(here, rel=0.01)
    assert there != here


def test_the_device_is_named_and_what_it_has_no_units_for() -> None:
    found = executed_on()
    assert found["device"] == torch.cuda.get_device_name(0)
    units = scaled_mm.has_units(torch.device("cuda", 0))
    assert found["emulated"] == ([] if units else ["fp8"])
