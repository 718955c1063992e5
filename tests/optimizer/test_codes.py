from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from optimizer import quantize as module
from optimizer.errors import SpecError
from optimizer.formats import BF16, E4M3, E5M2, FORMATS, FP16, FP32, Format
from optimizer.quantize import (
    from_codes,
    linear_fp8,
    matmul_codes,
    quantize,
    round_to_format,
    to_codes,
)
from optimizer.reference import decode
from optimizer.stack import Granularity
from tests.optimizer.numbers import (
    EIGHT_BITS,
    assert_same_bits,
    by_definition,
    normal,
    scaled,
)

ONE = torch.ones(())
TENSOR = Granularity.TENSOR

fp8 = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
eight_bits = pytest.mark.parametrize("fmt", EIGHT_BITS, ids=lambda f: f.name)


# Bytes


@eight_bits
def test_every_code_survives_values_and_back(fmt: Format) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = from_codes(codes, fmt)
    finite = values.isfinite()
    assert torch.equal(to_codes(values[finite], fmt), codes[finite])
    assert values[finite].tolist() == [decode(fmt, int(c)) for c in codes[finite]]


@eight_bits
def test_nan_keeps_a_code_of_nan(fmt: Format) -> None:
    assert from_codes(to_codes(torch.tensor([torch.nan]), fmt), fmt).isnan().all()


@pytest.mark.parametrize("name", ["fp6_e3m2", "fp6_e2m3", "fp4_e2m1"])
def test_small_formats_have_codes_too(name: str) -> None:
    fmt = FORMATS[name]
    codes = torch.arange(1 << fmt.bits, dtype=torch.uint8)
    assert torch.equal(to_codes(from_codes(codes, fmt), fmt), codes)


@fp8
def test_codes_are_what_torch_reads_as_its_own_dtype(fmt: Format) -> None:
    dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[fmt.name]
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.view(dtype).float()
    torch.testing.assert_close(
        from_codes(codes, fmt), theirs, rtol=0, atol=0, equal_nan=True
    )


# Case A5
@pytest.mark.parametrize(("fmt", "count"), [(E4M3, 7), (E5M2, 3)])
def test_subnormals_survive_a_file(fmt: Format, count: int, tmp_path: Path) -> None:
    values = torch.arange(1, count + 1) * fmt.smallest_subnormal
    save_file({"weight": to_codes(values, fmt)}, tmp_path / "weight.safetensors")
    codes = load_file(tmp_path / "weight.safetensors")["weight"]
    assert codes.tolist() == list(range(1, count + 1))
    assert torch.equal(from_codes(codes, fmt), values)


@pytest.mark.parametrize("view", [lambda w: w.t(), lambda w: w[:, ::2]])
def test_strides_do_not_change_bytes(view: object) -> None:  # case C19
    weight = view(normal(6, 8))  # type: ignore[operator]
    codes = to_codes(weight, E4M3)
    assert codes.is_contiguous()
    assert torch.equal(codes, to_codes(weight.contiguous(), E4M3))
    assert from_codes(codes.t(), E4M3).is_contiguous()


# Matmul


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
