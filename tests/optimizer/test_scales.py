import pytest
import torch
from torch import Tensor

from optimizer.compensate import row_losses
from optimizer.execute import WeightCodes
from optimizer.formats import E4M3, FORMATS
from optimizer.hessians import Hessians, key_of
from optimizer.quantize import amax, fake_quantize, quantize, scale_from_amax
from optimizer.scales import LEAST_GAIN, FittedCodes, weight_scale
from optimizer.stack import Component, Granularity, Precision, Site
from tests.optimizer import tiny

FP4 = FORMATS["fp4_e2m1"]  # 16 numbers: its range is what it lacks


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def squared(x: Tensor, scale: Tensor) -> float:
    return float((x - fake_quantize(x, scale, FP4)).square().sum())


@pytest.mark.parametrize("granularity", [Granularity.TENSOR, Granularity.CHANNEL])
def test_an_outlier_that_costs_all_others_is_clipped(granularity: Granularity) -> None:
    weight = random(16, 256)
    weight[:, 0] = 5.0  # a fifth more than the largest of 256 normal values is likely
    scale = scale_from_amax(amax(weight, granularity), FP4)
    found = weight_scale(weight, scale, FP4)
    assert found.scale.shape == scale.shape
    assert (found.ratio < 1).any()
    assert torch.equal(found.scale, scale * found.ratio)
    saved = 1 - squared(weight, found.scale) / squared(weight, scale)
    assert found.gain == pytest.approx(saved, abs=1e-5)
    assert saved >= LEAST_GAIN


def test_what_matters_little_may_be_lost() -> None:
    weight = random(16, 256)
    weight[:, 0] = 5.0
    scale = scale_from_amax(amax(weight, Granularity.CHANNEL), FP4)
    importance = torch.ones(256)
    importance[0] = 100.0  # now the outlier is what matters
    kept = weight_scale(weight, scale, FP4, importance).ratio.mean()
    assert kept > weight_scale(weight, scale, FP4).ratio.mean()


def test_numbers_of_the_format_are_left_alone() -> None:
    weight = torch.tensor([[6.0, 3.0, -1.5, 0.5], [6.0, 0.0, 2.0, -4.0]])
    found = weight_scale(weight, torch.ones(2, 1), FP4)
    assert found.ratio.tolist() == [[1.0], [1.0]]
    assert found.gain == 0.0


def test_rows_find_scales_under_which_what_matters_is_exact() -> None:
    # Under 1 / 256 e4m3 has 1 and 1.5 exactly, and 1.7 not. Only the first two values
    # matter.
    weight = torch.tensor([[1.0, 1.5, 1.7], [1.0, 1.5, 1.7]])
    scale = scale_from_amax(amax(weight, Granularity.CHANNEL), E4M3)
    importance = torch.tensor([1.0, 1.0, 1e-6])
    exact = float(2.0**-8 / scale[0, 0])
    found = weight_scale(weight, scale, E4M3, importance, ratios=(exact,))
    assert found.ratio[:, 0].tolist() == pytest.approx([exact, exact])
    assert found.gain > 0.99


def test_a_power_of_two_changes_nothing_in_the_range_of_e4m3() -> None:
    weight = random(16, 64)
    scale = scale_from_amax(amax(weight, Granularity.CHANNEL), E4M3)
    found = weight_scale(weight, scale, E4M3, ratios=(2.0, 4.0))
    assert torch.equal(found.ratio, torch.ones(16, 1))


def test_rows_of_a_model_get_fitted_scales_and_lose_less() -> None:
    model = tiny.loaded()
    hessians = Hessians()
    with torch.no_grad():
        model.forward(tiny.ids(), hessians)
    part = model.parts[Site(0, Component.FFN_OUT)][0]
    channel = Precision("fp8_e4m3", Granularity.CHANNEL)
    fitted, nearest = FittedCodes(model, hessians), WeightCodes(model)
    hessian = hessians.hessian(key_of(part))
    importance = torch.diag(hessian.diagonal())
    lost = []
    for codes in (fitted, nearest):
        q, scale = codes.get(part, channel)
        assert scale is not None
        assert torch.equal(quantize(q, torch.ones(()), E4M3), q)
        lost.append(float(row_losses(part.weight, q, scale, importance).sum()))
    assert lost[0] < 0.95 * lost[1]
    found = fitted.found[part.name, channel]
    assert found.gain == pytest.approx(1 - lost[0] / lost[1], abs=1e-3)
    fitted.drop()  # as when the weights of a stage go: scales stay what they were
    again = fitted.get(part, channel)[1]
    assert again is found.scale
    tensor = Precision("fp8_e4m3", Granularity.TENSOR)
    assert torch.equal(fitted.get(part, tensor)[0], nearest.get(part, tensor)[0])
