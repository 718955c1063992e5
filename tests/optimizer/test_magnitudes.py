"""The histogram of |x| against the tensors that it stands for."""

import math

import numpy as np
import pytest
import torch

from optimizer.formats import E4M3, E5M2, Format
from optimizer.magnitudes import BINS, EDGES, LOWEST, MIDDLES, Magnitudes
from optimizer.metrics import sqnr_db
from optimizer.quantize import fake_quantize, flushed_share
from optimizer.statistics import magnitudes_of
from tests.optimizer.numbers import normal


def test_bins_join_and_cover_every_scale_that_occurs() -> None:
    assert len(EDGES) == BINS + 1
    assert (EDGES[0], EDGES[-1]) == (2.0**-64, 2.0**64)
    assert np.all(np.diff(EDGES) > 0)
    assert EDGES[8 * 64] == 1.0


def test_every_value_lies_between_the_edges_of_its_bin() -> None:
    x = torch.cat([normal(1000) * 2.0**k for k in (-40, -9, 0, 30)])
    for value in x.abs().tolist():
        (bin_,) = np.flatnonzero(magnitudes_of(torch.tensor([value])).counts)
        assert EDGES[bin_] <= value < EDGES[bin_ + 1]


def test_zeros_are_apart_and_the_outermost_bins_take_what_is_beyond() -> None:
    found = magnitudes_of(torch.tensor([0.0, -0.0, 1e-30, -1e30, 3.0]))
    assert found.zeros == 2
    assert (found.counts[0], found.counts[-1], found.nonzero) == (1, 1, 3)


def test_merging_is_seeing_both() -> None:
    x, y = normal(300, seed=1), 100 * normal(200, seed=2)
    both = magnitudes_of(torch.cat([x, y]))
    merged = magnitudes_of(y).merge(magnitudes_of(x))
    assert np.array_equal(merged.counts, both.counts)
    assert merged.zeros == both.zeros


def test_shares_and_quantiles_are_those_of_the_values() -> None:
    x = normal(100_000, seed=3)
    found = magnitudes_of(x)
    for limit in (1e-3, 0.05, 0.7, 3.0):
        share = float((x.abs() < limit).float().mean())
        # A bin is an eighth of an octave wide: what is uneven inside is below this.
        assert found.below(limit) == pytest.approx(share, abs=2e-3)
        assert found.quantile(share) == pytest.approx(limit, rel=1 / 8)  # a bin
    assert found.below(0.0) == 0.0
    assert found.below(math.inf) == 1.0


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
@pytest.mark.parametrize("outlier", [4.5, 3e3, 3e4, 3e5])
def test_what_a_scale_flushes_and_costs_is_foreseen(
    outlier: float, fmt: Format
) -> None:
    # Case B4: one value sets the scale of all the others.
    x = normal(512, 256)
    scale = torch.tensor(outlier / fmt.max)
    found = magnitudes_of(x)
    flushed = flushed_share(x, scale, fmt)
    assert found.flushed(float(scale), fmt) == pytest.approx(flushed, abs=2e-3)
    measured = sqnr_db(x, fake_quantize(x, scale, fmt))
    # Errors are taken as evenly spread inside a step; half a decibel is their excess.
    assert found.sqnr_db(float(scale), fmt) == pytest.approx(measured, abs=0.5)


def test_an_alignment_that_happens_to_be_good_can_be_left_out() -> None:
    x = 1.9 + 0.01 * normal(64, 64)  # as fine as steps get, with a scale of 1
    found = magnitudes_of(x)
    shifts = [2.0 ** (k / 16) / 16 for k in range(16)]
    each = [10 ** (-found.sqnr_db(s, E4M3) / 10) for s in shifts]
    mean = -10 * math.log10(sum(each) / len(each))
    for scale in shifts:
        smooth = found.sqnr_db(scale, E4M3, any_alignment=True)
        assert smooth == pytest.approx(mean, abs=0.2)
    assert max(each) > 3 * min(each)  # or the case shows nothing


def test_what_saturates_costs_its_excess() -> None:
    x = normal(512, 256)
    scale = torch.tensor(1.0 / E4M3.max)  # clips at 1, a third of the values
    measured = sqnr_db(x, fake_quantize(x, scale, E4M3))
    expected = magnitudes_of(x).sqnr_db(float(scale), E4M3)
    assert expected == pytest.approx(measured, abs=0.5)


def test_nothing_seen_is_nothing_lost() -> None:
    empty = Magnitudes()
    assert empty.below(1.0) == 0.0
    assert empty.quantile(0.5) == 0.0
    assert empty.sqnr_db(1.0, E4M3) == math.inf
    assert empty.to_json() == {"first": 0, "counts": [], "zeros": 0}


def test_json_counts_the_powers_of_two_from_the_first_that_occurs() -> None:
    found = magnitudes_of(torch.tensor([0.0, 0.25, 0.3, 1.0, 1.99]))
    assert found.to_json() == {"first": -2, "counts": [2, 0, 2], "zeros": 1}
    assert MIDDLES[8 * -LOWEST] > 1.0
