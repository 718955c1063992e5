"""What a probe calls by name, on figures made by hand."""

import pytest
import torch

from optimizer.training.candidates import CANDIDATES
from optimizer.training.causes import of_baseline, of_candidate
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


# Ten steps of one sample each, as a model of 135M parameters really had them.
HARD_LAST = [2.62, 2.03, 3.83, 2.97, 3.41, 4.36, 4.61, 5.74, 4.63, 3.48]
OTHER_ORDER = [3.73, 2.04, 2.98, 4.88, 5.64, 4.62, 2.57, 3.38, 3.7, 4.26]
DIVERGES = [2.6, 2.5, 2.6, 2.8, 3.1, 3.9, 5.2, 7.0, 9.5, 14.0]


@pytest.mark.parametrize(
    ("losses", "again", "codes"),
    [
        (HARD_LAST, OTHER_ORDER, []),
        (HARD_LAST, HARD_LAST, []),  # by no more than they scatter
        (DIVERGES, DIVERGES, ["learning_rate"]),
        (DIVERGES, OTHER_ORDER, []),  # in one order alone
        ([2.0, 2.1, 2.2, 2.3], [2.0, 2.1, 2.2, 2.3], ["learning_rate"]),
    ],
)
def test_a_loss_rises_in_both_orders_and_by_more_than_it_scatters(
    losses: list[float], again: list[float], codes: list[str]
) -> None:
    found = of_baseline(Figures(losses=losses), Figures(losses=again))
    assert [one.code for one in found] == codes
