import pytest
import torch
from torch import Tensor
from torch.nn import functional

from optimizer import matmul as module
from optimizer.errors import SpecError
from optimizer.formats import BF16, E4M3, E5M2, FP16, FP32, Format
from optimizer.matmul import (
    linear,
    linear_fp8,
    matmul_codes,
    rough,
    rough_linear,
    rough_way_back,
)
from optimizer.quantize import quantize, round_to_format
from optimizer.stack import Granularity
from tests.optimizer.numbers import assert_same_bits, by_definition, normal, scaled

ONE = torch.ones(())
TENSOR = Granularity.TENSOR


@pytest.mark.parametrize("kernel", ["onednn", "none"])
def test_linear_and_its_gradient_are_those_of_torch(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "none":
        monkeypatch.setattr(module, "_KERNEL", None)
    x, weight, bias = normal(2, 5, 48), normal(24, 48, seed=1), normal(24, seed=2)
    ours, theirs = (x.clone().requires_grad_(True) for _ in range(2))
    y, want = linear(ours, weight, bias), functional.linear(theirs, weight, bias)
    y.square().sum().backward()
    want.square().sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(linear(x, weight.T.contiguous().T), x @ weight.T)


def test_linear_of_no_tokens_is_empty() -> None:
    assert linear(torch.zeros(0, 8), torch.zeros(4, 8)).shape == (0, 4)


def some_codes(rows: int, columns: int, fmt: Format, seed: int) -> Tensor:
    x = normal(rows, columns, seed=seed)
    return quantize(x, scaled(x, TENSOR, fmt), fmt)


@pytest.mark.parametrize("precision", ["ieee", "bf16"])
@pytest.mark.parametrize("fmts", [(E4M3, E4M3), (E5M2, E4M3), (BF16, E4M3)])
def test_products_of_codes_are_exact(
    fmts: tuple[Format, Format], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MATMUL_PRECISION", precision)
    flag = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = flag.fp32_precision
    a, b = some_codes(32, 768, fmts[0], 0), some_codes(48, 768, fmts[1], 1)
    exact = a.double() @ b.double().T
    # Any order of 768 float32 additions: Higham's bound, (k u) Σ|a||b|, u = 2^-24.
    bound = 768 * 2**-24 * (a.abs().double() @ b.abs().double().T)
    assert ((matmul_codes(a, b).double() - exact).abs() <= bound).all()
    assert flag.fp32_precision == before


def test_an_older_torch_multiplies_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends, "mkldnn", object())
    assert matmul_codes(torch.ones(1, 3), torch.ones(2, 3)).tolist() == [[3.0, 3.0]]


# Case A11
def test_the_scale_comes_after_a_float32_sum_and_before_narrowing() -> None:
    x, weight = torch.full((1, 64), 448.0), torch.full((1, 64), 4.0)
    scale = torch.tensor(0.5 / 448)
    assert matmul_codes(x, weight).item() == 114688  # inf, were it fp16
    assert linear_fp8(x, weight, scale, ONE, E4M3, FP16).item() == 128.0


def test_linear_rounds_once() -> None:
    # Codes and sums are small integers and scales powers of two: exact until rounded.
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 9, (2, 5, 64), generator=generator).float()
    weight = torch.randint(-8, 9, (6, 64), generator=generator).float()
    weight_scale = torch.tensor([1.0, 2, 4, 0.5, 0.25, 1]).view(6, 1)  # per channel
    input_scale = torch.tensor([0.5, 1, 2, 4, 8]).view(1, 5, 1)  # per token
    bias = torch.tensor([0.125, 1, 2, 3, 4, 5])
    got = linear_fp8(
        x * input_scale, weight, weight_scale, input_scale, E4M3, BF16, bias
    )
    exact = (x * input_scale) @ (weight * weight_scale).T + bias
    assert_same_bits(got, by_definition(exact, BF16))
    assert not torch.equal(got, exact)  # there was something to round


def test_bf16_input_makes_a_linear_weight_only() -> None:
    x, weight = normal(4, 32), some_codes(8, 32, E4M3, 1)
    got = linear_fp8(x, weight, ONE * 0.5, ONE, BF16, FP32)
    want = matmul_codes(round_to_format(x, BF16), weight) * 0.5
    assert_same_bits(got, want)


def test_block_scales_do_not_fit_behind_the_sum() -> None:
    with pytest.raises(SpecError, match="32 weight scales for 4 outputs"):
        linear_fp8(
            ONE.expand(1, 8), torch.ones(4, 8), torch.ones(4, 8), ONE, E4M3, BF16
        )


@pytest.mark.parametrize(
    ("precision", "units"),
    [(torch.float32, "ieee"), (torch.bfloat16, "ieee"), (torch.bfloat16, "bf16")],
)
def test_the_rough_way_back_is_near_the_exact_one(
    precision: torch.dtype, units: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROUGH", precision)
    monkeypatch.setattr(module, "MATMUL_PRECISION", units)
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(3, 16, 48, generator=generator)
    weight = torch.randn(48, 32, generator=generator)
    exact = gradient.double() @ weight.double()
    size = (gradient.abs() @ weight.abs()).double()
    # Two operands and the result are rounded, each by half an ulp of 8 bits at most.
    bound = 2**-22 if precision == torch.float32 else 3.1 * 2**-9
    found = rough_way_back(gradient, weight).double()
    assert bool(((found - exact).abs() <= bound * size).all())


@pytest.mark.parametrize("units", ["ieee", "bf16"])
def test_products_of_estimates_have_one_result_on_any_number_of_threads(
    units: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MATMUL_PRECISION", units)
    x, weight, gradient = normal(640, 96), normal(4096, 96), normal(640, 4096)
    x.requires_grad_(True)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        heard: list[Tensor] = []
        y = rough_linear(x, weight, None, heard.append)
        (back,) = torch.autograd.grad(y, x, gradient)
        assert torch.equal(heard[0], rough(gradient))
        found.append((y, back if units == "bf16" else y))
    torch.set_num_threads(before)
    exact = x.detach().double() @ weight.double().T
    size = x.detach().abs().double() @ weight.abs().double().T
    assert bool(((found[0][0].double() - exact).abs() <= 2.1 * 2**-9 * size).all())
    for y, back in found[1:]:
        assert torch.equal(y, found[0][0])
        assert torch.equal(back, found[0][1])
