import pytest
import torch
from torch import Tensor

from optimizer.errors import HardwareError
from optimizer.execute import Operand, multiply_codes, round_operand
from optimizer.formats import BF16, E4M3, E5M2, FORMATS
from optimizer.quantize import round_to_format, to_codes
from optimizer.scaled_mm import (
    Packed,
    grow,
    narrowed,
    packed,
    padded_mm,
    refusal,
    runs,
    scaled_mm,
)
from optimizer.stack import (
    CHOICES,
    Choice,
    Component,
    Granularity,
    Precision,
    choice_named,
)
from tests.optimizer.numbers import assert_same_bits, normal

FP8 = [
    choice_named(Component.FFN_IN, name)
    for name in ("fp8_e4m3", "fp8_e4m3_token", "fp8_e5m2")
]


def operands(choice: Choice, m: int, n: int, k: int) -> tuple[Operand, Operand]:
    assert choice.weight is not None
    x, weight = normal(m, k), normal(n, k, seed=1) * 0.02
    largest = torch.tensor(3.0)  # some of x saturates
    return (
        round_operand(x, choice.input, largest),
        round_operand(weight, choice.weight, weight.abs().amax()),
    )


def packs(choice: Choice, m: int, n: int, k: int) -> tuple[Packed, Packed]:
    x, weight = operands(choice, m, n, k)
    assert choice.weight is not None
    return (
        packed(x, FORMATS[choice.input.format]),
        packed(weight, FORMATS[choice.weight.format]),
    )


def plain(m: int, n: int, k: int, dtypes: tuple[torch.dtype, torch.dtype]) -> tuple:
    return tuple(
        Packed(torch.zeros(rows, k).to(dtype), torch.ones(()))
        for rows, dtype in zip((m, n), dtypes, strict=True)
    )


def within_an_ulp(got: Tensor, wanted: Tensor) -> None:
    """Sums in fp32, in some order, rounded to bf16 once: ties may fall either way."""
    assert got.dtype == torch.bfloat16
    ulp = 2.0**-8 * wanted.abs()  # half of it on each side of a rounding boundary
    noise = 2.0**-20 * wanted.abs().max()  # where sums cancel
    assert ((got.float() - wanted).abs() <= 2 * ulp + noise).all()
    assert (got.float() == round_to_format(wanted, BF16)).float().mean() > 0.98


# What it multiplies


@pytest.mark.parametrize("choice", FP8, ids=lambda c: c.name)
def test_the_operator_gives_what_the_emulation_gives(choice: Choice) -> None:
    x, weight = operands(choice, 5, 48, 64)
    got = scaled_mm(*packs(choice, 5, 48, 64))
    within_an_ulp(got, multiply_codes(x, weight, choice))


@pytest.mark.parametrize("choice", FP8, ids=lambda c: c.name)
@pytest.mark.parametrize("size", [8, 15, 24])
def test_case_c9_sizes_are_padded_and_the_result_is_not(
    choice: Choice, size: int
) -> None:
    for n, k in ((size, 64), (64, size), (size, size)):
        x, weight = operands(choice, 3, n, k)
        got = padded_mm(*packs(choice, 3, n, k))
        assert got.shape == (3, n)
        within_an_ulp(got, multiply_codes(x, weight, choice))


def test_a_bias_is_added_before_the_rounding() -> None:
    choice = FP8[0]
    x, weight = operands(choice, 4, 24, 32)
    bias = round_to_format(normal(24, seed=3), BF16)
    got = padded_mm(*packs(choice, 4, 24, 32), bias)
    within_an_ulp(got, multiply_codes(x, weight, choice) + bias)


def test_a_scale_for_all_rows_goes_with_one_for_each() -> None:
    x, weight = packs(FP8[1], 4, 32, 32)
    one = Packed(x.codes, torch.tensor(0.25))
    each = Packed(x.codes, torch.full((4, 1), 0.25))
    assert_same_bits(scaled_mm(one, weight).float(), scaled_mm(each, weight).float())


# What no GPU multiplies


def test_sizes_off_the_steps_are_refused_though_a_cpu_takes_them() -> None:
    e4m3 = torch.float8_e4m3fn
    for size in (8, 15, 24, 32001, 50257):
        by_n, by_k = plain(2, size, 16, (e4m3, e4m3)), plain(2, 16, size, (e4m3, e4m3))
        assert refusal(*by_n) == f"N = {size} is not a multiple of 16"
        assert refusal(*by_k) == f"K = {size} is not a multiple of 16"
    with pytest.raises(HardwareError, match="N = 15"):
        scaled_mm(*plain(2, 15, 16, (e4m3, e4m3)))
    for size in (32000, 50272):
        assert refusal(*plain(2, size, 16, (e4m3, e4m3))) is None


def test_one_operand_at_most_is_e5m2() -> None:
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    for pair in ((e4m3, e4m3), (e5m2, e4m3), (e4m3, e5m2)):
        assert refusal(*plain(2, 16, 16, pair)) is None
    no = refusal(*plain(2, 16, 16, (e5m2, e5m2)))
    assert no == "e5m2 × e5m2: one operand at most may be e5m2"


def test_operands_must_fit_each_other_and_lie_as_kernels_read_them() -> None:
    x, weight = packs(FP8[0], 4, 32, 64)
    other = packs(FP8[0], 4, 32, 48)[1]
    assert refusal(x, other) == "K = 64 and 48 differ"
    turned = Packed(other.codes.t().contiguous().t(), other.scale)
    assert refusal(Packed(x.codes[:, :48], x.scale), turned) == (
        "the first operand must lie row by row, the second column by column"
    )
    assert refusal(Packed(x.codes, x.scale.double()), weight) == (
        "a scale is torch.float64, not float32"
    )
    assert refusal(Packed(x.codes, torch.ones(3, 1)), weight) == (
        "scales (3, 1) are neither () nor (4, 1)"
    )


def test_it_runs_fp8_by_tensor_and_by_row() -> None:
    found = {c.name for c in CHOICES[Component.FFN_IN] if runs(c)}
    assert found == {"fp8_e4m3", "fp8_e4m3_token", "fp8_e5m2"}
    assert not runs(choice_named(Component.FFN_ACT, "fp8_e4m3"))


# How it gets there


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_narrowing_on_the_device_gives_our_codes(fmt: object) -> None:
    x = normal(64, 32) * 3
    x[0] = 0.0
    name = fmt.name  # type: ignore[attr-defined]
    for precision, largest in (
        (Precision(name), torch.tensor(4.0)),
        (Precision(name, Granularity.TOKEN), None),
    ):
        ours = round_operand(x, precision, largest)
        assert ours[1] is not None
        got = narrowed(x, precision, None if largest is None else ours[1])
        assert_same_bits(got.scale, ours[1])
        wanted = to_codes(ours[0], fmt)  # type: ignore[arg-type]
        assert torch.equal(got.codes.view(torch.uint8), wanted)


def test_growing_adds_zeros_and_scales_of_one() -> None:
    x = Packed(torch.ones(2, 3).to(torch.float8_e4m3fn), torch.full((2, 1), 0.5))
    grown = grow(x, 4, 16)
    assert grown.codes.float().sum() == 6
    assert grown.codes.float()[:2, :3].sum() == 6
    assert grown.scale.flatten().tolist() == [0.5, 0.5, 1.0, 1.0]
    assert grow(x, 2, 3) is x
    assert grow(Packed(x.codes, torch.ones(())), 2, 16).scale.shape == ()


def test_operands_move_to_a_device_whole() -> None:
    x = packs(FP8[1], 4, 32, 64)[0].to(torch.device("cpu"))
    assert x.codes.device == x.scale.device == torch.device("cpu")
