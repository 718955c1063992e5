"""What a probe calls by name, on figures made by hand."""

import pytest
import torch

from optimizer.training.candidates import CANDIDATES
from optimizer.training.causes import of_candidate
from optimizer.training.exponents import look
from optimizer.training.trainer import Figures

FP16 = CANDIDATES["fp16"]


def figures(amax: float) -> Figures:
    """A run whose one matrix puts out a value so large."""
    return Figures(
        losses=[1.0, 0.9], seen={"up": {"output": look(torch.tensor([amax, 1.0]), {})}}
    )


@pytest.mark.parametrize(
    ("amax", "code", "breaks"),
    [(25_100.0, "near_overflow", False), (40_000.0, "layer_overflow", True)],
)
def test_what_is_near_the_end_of_fp16_is_no_overflow_yet(
    amax: float, code: str, breaks: bool
) -> None:
    (found,) = of_candidate(FP16, figures(amax), figures(amax))
    assert (found.code, found.breaks, found.matrix) == (code, breaks, "up")
    assert found.first.startswith("train in bf16") is breaks


def test_far_from_the_end_nothing_is_said() -> None:
    assert of_candidate(FP16, figures(100.0), figures(100.0)) == []
