"""Scales for groups of neighbors and for blocks: codes, scales and products by hand."""

import math

import pytest
import torch
from torch import Tensor

from optimizer.execute import (
    Operand,
    Stacked,
    WeightCodes,
    multiply_codes,
    round_operand,
)
from optimizer.formats import BF16, E4M3, FORMATS, Format
from optimizer.matmul import grouped_product, integer_product
from optimizer.quantize import (
    amax,
    mx_scale,
    nv_scale,
    round_to_format,
    scale_from_amax,
)
from optimizer.reference import e8m0_floor_scale, nv_block_scale, round_to
from optimizer.stack import (
    CHOICES,
    GROUP_SIZES,
    Choice,
    Component,
    Granularity,
    Precision,
    Role,
    Site,
    Stack,
    choice_named,
)
from tests.optimizer import tiny
from tests.optimizer.numbers import assert_same_bits, normal

BLOCK, GROUP = Granularity.BLOCK, Granularity.GROUP
MX, NV = Granularity.MX, Granularity.NV
FP4, FP6 = FORMATS["fp4_e2m1"], FORMATS["fp6_e3m2"]
INT8, INT4 = FORMATS["int8"], FORMATS["int4"]
GROUPED = [
    Precision("fp8_e4m3", GROUP),
    Precision("fp6_e3m2", MX),
    Precision("fp4_e2m1", MX),
    Precision("fp4_e2m1", NV),
    Precision("int4", GROUP),
]
FP32_ULP = 2.0**-24  # half of one, relative


def uneven(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Normal numbers whose size changes along the row, a group of zeros among them."""
    x = normal(rows, columns, seed=seed)
    x = x * torch.logspace(-3, 3, columns)
    x[0, : GROUP_SIZES[GROUP]] = 0.0
    return x


def group_scale(values: list[float], whole: float, precision: Precision) -> float:
    """Return the float32 scale of one group by the one-number definitions."""
    fmt, largest = FORMATS[precision.format], max(abs(v) for v in values)
    if precision.granularity is MX:
        return e8m0_floor_scale(largest, fmt) if largest else 1.0
    if precision.granularity is NV:
        tensor = torch.tensor(whole) / E4M3.max / fmt.max
        ratio = torch.tensor(largest) / fmt.max / tensor  # fp32, as the kernel has it
        by_one = nv_block_scale(float(ratio) * fmt.max, 1.0, fmt) if largest else 1.0
        return float(torch.tensor(by_one) * tensor)
    return float(torch.tensor(largest) / fmt.max) if largest else 1.0


@pytest.mark.parametrize("precision", GROUPED, ids=str)
@pytest.mark.parametrize("columns", [256, 300])  # 300: the last group is shorter
def test_codes_and_scales_are_those_of_the_definition(
    precision: Precision, columns: int
) -> None:
    x, fmt = uneven(3, columns), FORMATS[precision.format]
    whole = x.abs().max()
    codes, scale = round_operand(x, precision, whole)
    assert scale is not None
    assert scale.shape == x.shape
    size = GROUP_SIZES[precision.granularity]
    for row in range(3):
        for start in range(0, columns, size):
            part = slice(start, min(start + size, columns))
            one = group_scale(x[row, part].tolist(), float(whole), precision)
            assert (scale[row, part] == one).all()
            divided = (x[row, part] / torch.tensor(one)).tolist()
            want = torch.tensor([round_to(fmt, v) for v in divided])
            assert_same_bits(codes[row, part], want)


def test_every_group_of_a_batch_has_a_scale_of_its_own() -> None:
    x = normal(2, 3, 256)
    _, scale = round_operand(x, Precision("fp8_e4m3", GROUP), None)
    assert scale is not None
    want = x.view(2, 3, 2, 128).abs().amax(-1) / 448
    assert torch.equal(scale[..., ::128], want)


@pytest.mark.parametrize("fmt", [FP4, FP6, E4M3], ids=lambda f: f.name)
def test_powers_of_two_are_those_of_the_definition(fmt: Format) -> None:
    # Case A9: exponents below one are floored, and 1.9 stays in the binade of 1.
    largest = [1.9, 0.3, 0.75, 0.003, 1.999, 2.0, 448.0, 1e30, 2.0**-100]
    got = mx_scale(torch.tensor(largest), fmt)
    want = [e8m0_floor_scale(float(torch.tensor(v)), fmt) for v in largest]
    assert got.tolist() == want
    assert all(math.frexp(s)[0] == 0.5 for s in got.tolist())


def test_scales_of_nothing_and_of_what_is_no_number() -> None:
    edges = torch.tensor([0.0, 1e-45, torch.nan, torch.inf])
    got = mx_scale(edges, FP4)
    assert got[0] == 1
    assert got[1] > 0
    assert got[2].isnan()
    assert got[3].isinf()
    block = nv_scale(torch.tensor([0.0, 1e-9, 6.0]), torch.tensor(6.0), FP4)
    assert block[0] > 0  # codes of zeros are zeros, whatever it is
    # Too small for e4m3 beside the largest: its smallest number, 2^-9.
    assert block[1] == 2**-9 * block[2] / 448
    assert nv_scale(torch.zeros(3), torch.zeros(()), FP4).isfinite().all()


@pytest.mark.parametrize("fmt", [INT8, INT4], ids=lambda f: f.name)
def test_integers_round_to_even_and_saturate_symmetrically(fmt: Format) -> None:
    x = torch.tensor([0.5, 1.5, -2.5, fmt.max + 0.4, -fmt.max - 3, -0.2])
    codes, scale = round_operand(x[None], Precision(fmt.name), torch.tensor(fmt.max))
    assert scale == 1
    assert codes.tolist() == [[0.0, 2.0, -2.0, fmt.max, -fmt.max, 0.0]]
    assert math.copysign(1, codes[0, -1].item()) == 1  # no negative zero


# Products


def bound(x: Tensor, weight: Tensor, roundings: int) -> Tensor:
    """Return Higham's bound for any order of float32 additions, and some roundings."""
    return (x.abs() @ weight.abs().T) * (x.shape[-1] + roundings) * FP32_ULP


def operands(choice: Choice, k: int) -> tuple[Operand, Operand]:
    assert choice.weight is not None
    x, w = uneven(5, k), uneven(7, k, seed=1)
    rows = round_operand(x, choice.input, x.abs().max())
    if choice.weight.granularity is BLOCK:
        w = normal(200, k, seed=1)  # the second block of rows is shorter
        scale = scale_from_amax(amax(w, BLOCK), E4M3)
        codes = w.div(scale).flatten().tolist()
        one_by_one = torch.tensor([round_to(E4M3, v) for v in codes])
        stored: Operand = one_by_one.view(w.shape), scale
    else:
        stored = round_operand(w, choice.weight, w.abs().max())
    return rows, stored


def values(operand: Operand) -> Tensor:
    """Return what codes stand for, in float64."""
    codes, scale = operand
    return codes.double() if scale is None else codes.double() * scale.double()


NEW = [
    c for c in CHOICES[Component.FFN_IN] if c.on_request or c.name == "fp8_e4m3_block"
]


@pytest.mark.parametrize("choice", NEW, ids=lambda c: c.name)
@pytest.mark.parametrize("k", [256, 300])
def test_products_are_those_of_the_values_that_codes_stand_for(
    choice: Choice, k: int
) -> None:
    rows, stored = operands(choice, k)
    a, b = values(rows), values(stored)
    got = multiply_codes(rows, stored, choice)
    assert ((got.double() - a @ b.T).abs() <= bound(a, b, 4)).all()


@pytest.mark.parametrize("choice", NEW, ids=lambda c: c.name)
def test_a_linear_is_its_product_biased_and_rounded_once(choice: Choice) -> None:
    model, x, static = tiny.loaded("Qwen2ForCausalLM"), normal(2, 5, 32), torch.ones(())
    site = Site(0, Component.ATTN_QKV)
    part = model.parts[site][-1]
    assert part.bias is not None
    assert choice.weight is not None
    weights = WeightCodes(model)
    executor = Stacked(Stack({site: choice}), {(site, Role.INPUT): static}, weights)
    rows, stored = (
        round_operand(x, choice.input, static),
        weights.get(part, choice.weight),
    )
    want = multiply_codes(rows, stored, choice) + part.bias
    assert_same_bits(executor.linear(part, x), round_to_format(want, BF16))


def test_the_tensors_scale_of_nvfp4_is_that_of_all_fused_matrices() -> None:
    model = tiny.loaded("Qwen2ForCausalLM")
    q, k, _ = model.parts[Site(0, Component.ATTN_QKV)]
    with torch.no_grad():
        k.weight[0, 0] = 100.0
    _, scale = WeightCodes(model).get(q, Precision("fp4_e2m1", NV))
    assert scale is not None
    in_units = scale / scale_from_amax(torch.tensor(100.0 / 448), FP4)
    # But for the last bits of making and undoing the product.
    torch.testing.assert_close(
        in_units, round_to_format(in_units, E4M3), rtol=2**-22, atol=0.0
    )


def test_scales_of_a_group_belong_inside_the_sum() -> None:
    # Two groups, scales 2 and 2^-20: behind the sum no single number would do.
    x = torch.ones(1, 256)
    scale = torch.cat([torch.full((1, 128), 2.0), torch.full((1, 128), 2.0**-20)], 1)
    got = grouped_product(x, scale, torch.ones(1, 256), None, 128)
    assert got.item() == 128 * 2 + 128 * 2.0**-20
    assert grouped_product(x, None, torch.ones(1, 256), scale, 128) == got
    assert grouped_product(x, None, torch.ones(1, 256), None, 128).item() == 256


# Case A11
def test_integers_are_summed_exactly_beyond_what_float32_holds() -> None:
    # 4096 products of 127 · 127, and a 1: past 2^24 float32 would lose the 1.
    x, weight = torch.full((1, 4097), 127.0), torch.full((1, 4097), 127.0)
    x[0, -1] = weight[0, -1] = 1.0
    exact = 4096 * 127 * 127 + 1
    assert integer_product(x, weight).item() == float(torch.tensor(float(exact)))
    # Near cancellation the last 1 is all that is left.
    weight[0, 2048:4096] = -127.0
    assert integer_product(x, weight).item() == 1.0


@pytest.mark.parametrize("name", ["fp8_e4m3_block", "fp4_e2m1_nv", "int4_weight_only"])
def test_weights_of_a_model_get_their_groups(name: str) -> None:
    model = tiny.loaded("GPT2LMHeadModel")  # a Conv1D: stored the other way round
    (part,) = model.parts[Site(0, Component.FFN_OUT)]  # 32 outputs of 128 inputs
    precision = choice_named(Component.FFN_OUT, name).weight
    assert precision is not None
    codes, scale = WeightCodes(model).get(part, precision)
    assert scale is not None
    assert codes.shape == scale.shape == part.weight.shape
    size = GROUP_SIZES[precision.granularity]
    per_row = 1 if precision.granularity is BLOCK else len(codes)
    assert len(scale[:, ::size].unique()) <= per_row * math.ceil(codes.shape[1] / size)
    error = (codes * scale - part.weight).norm() / part.weight.norm()
    assert error < {"fp8_e4m3_block": 0.04}.get(name, 0.15)
