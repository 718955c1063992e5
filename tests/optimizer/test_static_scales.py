import pytest
import torch
from torch import Tensor

from optimizer.formats import E4M3, E5M2
from optimizer.quantize import fake_quantize, scale_from_amax
from optimizer.stack import Component, Precision, Role, Site, Stack, choice_named
from optimizer.static_scales import (
    BINS,
    CLIPPED,
    Costs,
    fitted,
    middles,
    scaled,
    static_places,
)

ATTENTION = Site(0, Component.ATTN_SCORES)
FFN = Site(0, Component.FFN_IN)


def costs(x: Tensor, squared: Tensor, heads: int = 0) -> Costs:
    found = Costs(heads)
    found.add(x, squared)
    return found


def lost(x: Tensor, squared: Tensor, scale: Tensor) -> float:
    return float((squared * (x - fake_quantize(x, scale, E4M3)).square()).sum())


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_every_magnitude_is_counted_in_the_bin_around_it() -> None:
    at = middles()
    assert len(at) == BINS
    assert bool((at[1:] > at[:-1]).all())
    x = torch.tensor([1.0, -1.0, 1.9999, 3.0, 0.0])
    totals = costs(x, torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])).totals[0]
    filled = totals.nonzero().flatten()
    assert totals[filled].tolist() == [16.0, 3.0, 4.0, 8.0]  # zero comes first
    assert at[filled[1:]].tolist() == pytest.approx([1.0, 2.0, 3.0], rel=1 / 256)


def test_values_between_two_numbers_find_a_scale_that_has_them() -> None:
    # Of e4m3, 1 and 1.125 are neighbors; under 2^-8, which 1.75 asks for, 1.0625 loses
    # a whole 1 / 16 of itself.
    x = torch.tensor([1.75, *[1.0625] * 99])
    squared = torch.ones(100)
    scale = scale_from_amax(x.amax(), E4M3)
    assert float(scale) == 2.0**-8
    ratio = costs(x, squared).ratio(scale, E4M3)
    assert 1 < float(ratio) < 2  # nothing is clipped
    assert lost(x, squared, scale * ratio) < 0.5 * lost(x, squared, scale)


def test_numbers_of_the_format_keep_their_scale() -> None:
    # Bins of 1 / 128: of 448 the middle lies off by an eighth of a step.
    x = torch.tensor([448.0, 256.0, 1.0])
    ratio = costs(x, torch.ones(3)).ratio(torch.ones(()), E4M3)
    assert float(ratio) == 1.0


def test_what_an_error_costs_decides_whether_the_largest_is_clipped() -> None:
    # e4m3's smallest number is 2^-9 of a scale of 2^20 / 448: 4.6, and half of it is
    # where values begin to vanish.
    x = torch.cat([3 * normal(1 << 12), torch.tensor([2.0**20])])
    squared = torch.ones(len(x))
    scale = scale_from_amax(x.amax(), E4M3)
    assert float(costs(x, squared).ratio(scale, E4M3)) >= 1.0
    squared[-1] = 0.0  # nobody looks at the largest
    assert float(costs(x, squared).ratio(scale, E4M3)) == CLIPPED[0]


def test_heads_are_counted_and_fitted_apart() -> None:
    x = torch.ones(1, 2, 3, 4)
    x[:, 0] *= 1.0625
    x[:, :, 0, 0] = 1.75
    found = costs(x, torch.ones_like(x), heads=2)
    assert found.totals.sum(1).tolist() == [12.0, 12.0]
    largest = x.amax((0, 2, 3))
    precision = choice_named(Component.ATTN_SCORES, "fp8_e4m3_head").input
    ratios = fitted(found, precision, largest)
    assert float(ratios[0]) > 1.0
    assert float(ratios[1]) == 1.0
    together = fitted(costs(x, torch.ones_like(x)), Precision("fp8_e5m2"), largest)
    assert together.shape == ()


def test_what_was_never_seen_keeps_its_scale() -> None:
    assert Costs(2).ratio(torch.ones(2), E5M2).tolist() == [1.0, 1.0]


def test_places_are_those_that_calibration_has_a_scale_for() -> None:
    stack = Stack(
        {
            ATTENTION: choice_named(Component.ATTN_SCORES, "fp8_e4m3_head"),
            FFN: choice_named(Component.FFN_IN, "fp8_e4m3"),
            Site(1, Component.FFN_IN): choice_named(Component.FFN_IN, "fp8_e4m3_token"),
        }
    )
    amaxes = {
        (ATTENTION, Role.INPUT): torch.ones(2),
        (ATTENTION, Role.WEIGHT): torch.ones(2),  # K
        (FFN, Role.INPUT): torch.ones(()),
        (FFN, Role.OUTPUT): torch.ones(()),  # bf16: no scale
        (Site(1, Component.FFN_IN), Role.INPUT): torch.ones(()),  # from the token
    }
    found = static_places(stack, amaxes)
    assert set(found) == {
        (ATTENTION, Role.INPUT),
        (ATTENTION, Role.WEIGHT),
        (FFN, Role.INPUT),
    }
    new = scaled(amaxes, {(FFN, Role.INPUT): torch.tensor(1.5)})
    assert float(new[FFN, Role.INPUT]) == 1.5
    assert new[ATTENTION, Role.INPUT] is amaxes[ATTENTION, Role.INPUT]
