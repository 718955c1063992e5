"""FP8 products forth and back, beside numbers rounded one by one in float64."""

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from optimizer import scaled_mm
from optimizer.training.candidates import (
    CANDIDATES,
    Arithmetic,
    Candidate,
    Gemm,
    Promotion,
)
from optimizer.training.gemms import Recorder, Routed, route

Array = NDArray[np.float64]
E4M3, E5M2 = (ml_dtypes.float8_e4m3fn, 448.0), (ml_dtypes.float8_e5m2, 57344.0)


def held(x: Array, fmt: tuple[type, float], amax: float | None = None) -> Array:
    dtype, largest = fmt
    amax = float(np.abs(x).max()) if amax is None else amax
    scale = float(np.float32(amax / largest)) if amax else 1.0
    codes = np.clip((x / scale).astype(np.float32), -largest, largest).astype(dtype)
    return np.asarray(codes.astype(float) * scale)


def bf16(x: Array) -> Array:
    return np.asarray(x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(float))


def made(candidate: Candidate) -> tuple[nn.Linear, Routed]:
    torch.manual_seed(0)
    layer = nn.Linear(24, 16, bias=False)
    network = nn.Sequential(layer)
    return layer, route(network, candidate, Recorder(candidate))


def products(layer: nn.Linear, x: torch.Tensor, g: torch.Tensor) -> list[Array]:
    """y, dx and dW of a layer."""
    x = x.clone().requires_grad_()
    layer.weight.grad = None
    y = layer(x)
    y.backward(g.to(y.dtype))
    assert x.grad is not None
    assert layer.weight.grad is not None
    return [t.detach().double().numpy() for t in (y, x.grad, layer.weight.grad)]


@pytest.fixture
def operands() -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(10, 24, generator=rng)
    return x, (torch.randn(10, 16, generator=rng) * 1e-4).bfloat16().float()


def test_current_scaling(operands: tuple[torch.Tensor, torch.Tensor]) -> None:
    layer, _ = made(CANDIDATES["fp8_current"])
    found = products(layer, *operands)
    x, g = (t.double().numpy() for t in operands)
    w = layer.weight.detach().double().numpy()
    expected = [
        held(x, E4M3) @ held(w, E4M3).T,
        held(g, E5M2) @ held(w, E4M3),
        held(g, E5M2).T @ held(x, E4M3),
    ]
    for got, wanted in zip(found, expected, strict=True):
        # The sum is float32's, so the one rounding to bf16 may fall on the other side.
        assert np.mean(got == bf16(wanted)) > 0.99
        np.testing.assert_allclose(got, wanted, rtol=2**-7, atol=1e-12)


@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed"])
def test_units_of_a_device_give_what_is_emulated(
    name: str,
    operands: tuple[torch.Tensor, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch multiplies FP8 on CPUs as well: the same calls as on a GPU, sizes of which
    # it pads (24 and 10 are no multiples of 16).
    emulated = products(made(CANDIDATES[name])[0], *operands)
    monkeypatch.setattr(scaled_mm, "has_units", lambda where: True)
    asked: list[object] = []
    padded = scaled_mm.padded_mm
    monkeypatch.setattr(
        scaled_mm, "padded_mm", lambda a, b: asked.append(a.codes.dtype) or padded(a, b)
    )
    found = products(made(CANDIDATES[name])[0], *operands)
    assert asked == [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e5m2]
    for got, wanted in zip(found, emulated, strict=True):
        assert np.mean(got == wanted) > 0.99
        np.testing.assert_allclose(got, wanted, rtol=2**-7, atol=1e-12)


def test_what_is_not_finite_stays_so_on_a_devices_units(
    operands: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaled_mm, "has_units", lambda where: True)
    x, g = operands
    x[3, 5], g[2, 7] = torch.inf, torch.nan
    y, dx, dw = products(made(CANDIDATES["fp8_current"])[0], x, g)
    assert np.isnan(y[3]).all()
    assert np.isfinite(np.delete(y, 3, axis=0)).all()
    assert np.isnan(dx[2]).all()
    assert np.isnan(dw[7]).all()
    assert np.isnan(dw[:, 5]).all()


def test_a_promoted_product_is_not_given_to_the_units(
    operands: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    up = [Promotion("0", gemm, Arithmetic.BF16) for gemm in Gemm]
    wider = CANDIDATES["fp8_current"].promoted(up)
    emulated = products(made(wider)[0], *operands)
    monkeypatch.setattr(scaled_mm, "has_units", lambda where: True)
    monkeypatch.setattr(scaled_mm, "padded_mm", None)
    for a, b in zip(products(made(wider)[0], *operands), emulated, strict=True):
        np.testing.assert_array_equal(a, b)


def test_delayed_scales_are_one_then_those_of_the_step_before(
    operands: tuple[torch.Tensor, torch.Tensor],
) -> None:
    layer, routed = made(CANDIDATES["fp8_delayed"])
    x, g = operands
    w = layer.weight.detach().double().numpy()
    for amax in (None, 1.0):  # None: the scale is 1
        y = products(layer, x * 4, g)[0]
        factor = 448.0 if amax is None else float(4 * x.abs().max())
        weights = 448.0 if amax is None else float(np.abs(w).max())
        rows = held(4 * x.double().numpy(), E4M3, factor)
        wanted = rows @ held(w, E4M3, weights).T
        np.testing.assert_allclose(y, wanted, rtol=2**-7, atol=1e-6)
        routed.roll()


def test_a_delayed_scale_clamps_what_grew_since() -> None:
    layer, routed = made(CANDIDATES["fp8_delayed"])
    x, g = torch.ones(4, 24), torch.ones(4, 16)
    products(layer, x, g)
    routed.roll()
    grown = products(layer, 100 * x, g)[0]
    same = products(layer, x, g)[0]
    np.testing.assert_array_equal(grown, same)


@pytest.mark.parametrize("gemm", Gemm)
def test_one_product_alone_is_promoted(
    gemm: Gemm, operands: tuple[torch.Tensor, torch.Tensor]
) -> None:
    plain = CANDIDATES["fp8_current"]
    promoted = plain.promoted([Promotion("0", gemm, Arithmetic.BF16)])
    before, after = (
        products(made(plain)[0], *operands),
        products(made(promoted)[0], *operands),
    )
    changed = [not np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
    assert changed == [g is gemm for g in Gemm]


def test_all_three_in_fp32_are_plain(
    operands: tuple[torch.Tensor, torch.Tensor],
) -> None:
    up = [Promotion("0", gemm, Arithmetic.FP32) for gemm in Gemm]
    layer, _ = made(CANDIDATES["fp8_current"].promoted(up))
    y = layer(operands[0])
    assert torch.equal(y, nn.functional.linear(operands[0], layer.weight))


def test_what_is_not_finite_stays_so() -> None:
    layer, _ = made(CANDIDATES["fp8_current"])
    x = torch.ones(2, 24)
    x[0, 0] = torch.inf
    y = layer(x)
    assert not y[0].isfinite().any()
    assert y[1].isfinite().all()
