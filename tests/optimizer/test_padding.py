from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.functional import pad

from optimizer.choose import allowed, modelled
from optimizer.cost import site_cost
from optimizer.formats import BF16
from optimizer.hardware import device
from optimizer.matmul import matmul_codes, scaled_product
from optimizer.padding import Padding, fitting, padded, padding, pays
from optimizer.quantize import round_to_format
from optimizer.spec import OptimizeSpec, Workload
from optimizer.stack import (
    CHOICES,
    WHOLE_MODEL,
    Component,
    ModelShape,
    Site,
    SiteShape,
    choice_named,
)
from tests.optimizer.numbers import assert_same_bits, normal
from tests.optimizer.toy import BATCH, toy

H100 = device("h100")
SPEC = OptimizeSpec("toy", "toy", "0" * 64, "h100", workload=BATCH)
HEAD = Site(WHOLE_MODEL, Component.LM_HEAD)
BF16_CHOICE, FP8, WEIGHT_ONLY = (
    choice_named(Component.LM_HEAD, c)
    for c in ("bf16", "fp8_e4m3", "fp8_e4m3_weight_only")
)


def head(n: int, k: int) -> SiteShape:
    return SiteShape(HEAD, n, k, n * k, parts=(n,))


GPT2 = head(50257, 768)


@pytest.mark.parametrize(
    ("size", "fits"),
    [
        (8, 16),
        (15, 16),
        (16, 16),
        (24, 32),
        (32000, 32000),
        (32001, 32016),
        (50257, 50272),
        (128256, 128256),
        (151936, 151936),
    ],
)
def test_case_c9_sizes_become_multiples_of_16(size: int, fits: int) -> None:
    assert fitting(size) == fits
    by_n, by_k = padding(head(size, 64), FP8), padding(head(64, size), FP8)
    if size == fits:
        assert (by_n, by_k) == (None, None)
    else:
        assert by_n == Padding(size, 64, fits, 64)
        assert by_k == Padding(64, size, 64, fits)


def test_only_products_of_narrow_operands_are_padded() -> None:
    for choice in CHOICES[Component.LM_HEAD]:
        narrow = choice.is_narrow and not choice.weight_only
        assert (padding(GPT2, choice) is not None) == narrow
    attention = SiteShape(Site(0, Component.ATTN_SCORES), heads=4, head_dim=72)
    assert padding(attention, choice_named(Component.ATTN_SCORES, "fp8_e4m3")) is None


def test_experts_are_not_padded() -> None:
    assert padding(replace(GPT2, active_share=0.25), FP8) is None


def test_the_padded_shape_is_stored_read_and_multiplied() -> None:
    run = padded(GPT2, FP8)
    assert (run.n, run.k, run.weight_elements) == (50272, 768, 50272 * 768)
    assert padded(GPT2, BF16_CHOICE) is GPT2
    model = replace(toy(), hidden=768)
    as_is, larger = (site_cost(shape, FP8, H100, BATCH, model) for shape in (GPT2, run))
    assert larger.weight_bytes - as_is.weight_bytes == 15 * 768
    assert larger.per_token_s > as_is.per_token_s


# What the search sees


def model_with(shape: SiteShape) -> ModelShape:
    """The toy, with another head."""
    some = toy(tied=False)
    kept = tuple(s for s in some.sites if s.site != HEAD)
    return replace(some, sites=(*kept, shape))


def spec(engine: str = "any", batch: int = 16) -> OptimizeSpec:
    return replace(SPEC, engine=engine, workload=replace(BATCH, batch_size=batch))


def test_a_large_head_pays_and_a_tiny_one_does_not() -> None:
    # 50257 rows: half of 77 MB is saved, 12 kB are added. 15 × 24: only launches count.
    assert pays(GPT2, FP8, H100, spec(), model_with(GPT2))
    small = head(15, 24)
    assert not pays(small, FP8, H100, spec(), model_with(small))
    fits = head(50272, 768)
    assert not pays(fits, FP8, H100, spec(), model_with(fits))  # it runs as it is


def test_it_pays_where_only_the_first_token_gains() -> None:
    wide = SiteShape(Site(0, Component.FFN_IN), 4097, 4096, 4097 * 4096, parts=(4097,))
    choice = choice_named(Component.FFN_IN, "fp8_e4m3")
    b200 = device("b200")
    one = replace(SPEC, hardware="b200", workload=Workload(1, 8192, 128))
    model = toy()
    narrow, bf16 = (
        site_cost(padded(wide, c), c, b200, one.workload, model)
        for c in (choice, choice_named(Component.FFN_IN, "bf16"))
    )
    assert narrow.per_token_s > bf16.per_token_s
    assert narrow.first_token_s < bf16.first_token_s
    assert pays(wide, choice, b200, one, model)


@pytest.mark.parametrize("engine", ["vllm", "torchao"])
def test_engines_that_build_layers_from_the_configuration_get_no_padding(
    engine: str,
) -> None:
    assert not pays(GPT2, FP8, H100, spec(engine), model_with(GPT2))


def test_padding_heals_no_other_refusal() -> None:
    assert not pays(GPT2, FP8, device("a100"), spec(), model_with(GPT2))
    block = choice_named(Component.LM_HEAD, "fp8_e4m3_block")
    odd = head(50257, 760)  # 768 would do for blocks, but padding stops at 16: 768
    assert padded(odd, block).k == 768
    assert pays(odd, block, H100, spec(), model_with(odd))
    odd = head(50257, 1000)  # 1008 is not a multiple of 128
    assert not pays(odd, block, H100, spec(), model_with(odd))


def test_a_padded_choice_is_a_candidate_at_the_price_of_its_padding() -> None:
    model = model_with(GPT2)
    verdicts = allowed(model, H100, spec(), {})[HEAD]
    assert verdicts[FP8] is None
    assert allowed(model, H100, spec("vllm"), {})[HEAD][FP8] == (
        "N = 50257 is not a multiple of 16"
    )
    cost_of = modelled(model, H100, BATCH)
    assert cost_of(GPT2, FP8) == site_cost(padded(GPT2, FP8), FP8, H100, BATCH, model)
    assert cost_of(GPT2, WEIGHT_ONLY) == site_cost(
        GPT2, WEIGHT_ONLY, H100, BATCH, model
    )


# What comes out is what came out without


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 5),
    k=st.integers(1, 70),
    n=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)
def test_a_padded_product_is_the_unpadded_one_bit_for_bit(
    rows: int, k: int, n: int, seed: int
) -> None:
    # Codes are integers up to 16, so that float32 adds up to 2^24 / 256 of their
    # products without rounding, whatever order a kernel takes for either shape.
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-16, 17, (rows, k), generator=generator).float()
    weight = torch.randint(-16, 17, (n, k), generator=generator).float()
    scales = torch.rand(2, generator=generator) + 0.5
    wide_x = pad(x, (0, fitting(k) - k))
    wide_weight = pad(weight, (0, fitting(k) - k, 0, fitting(n) - n))
    as_is = scaled_product(x, scales[0], weight, scales[1])
    larger = scaled_product(wide_x, scales[0], wide_weight, scales[1])[:, :n]
    # But for the sign of a zero: -0 is -0 alone, and 0 with the zeros that are added.
    as_is, larger = as_is + 0.0, larger + 0.0
    assert_same_bits(as_is, larger)
    assert_same_bits(round_to_format(as_is, BF16), round_to_format(larger, BF16))


@pytest.mark.parametrize(("k", "n"), [(8, 15), (15, 24), (24, 8), (1001, 57)])
def test_other_codes_differ_by_the_order_of_the_sum_at_most(k: int, n: int) -> None:
    x, weight = normal(3, k), normal(n, k, seed=1)
    x, weight = round_to_format(x, BF16), round_to_format(weight, BF16)
    larger = matmul_codes(
        pad(x, (0, fitting(k) - k)), pad(weight, (0, fitting(k) - k, 0, fitting(n) - n))
    )[:, :n]
    exact = x.double() @ weight.double().T
    # k products, each added with half an ulp of float32.
    bound = (x.abs().double() @ weight.abs().double().T) * k * 2.0**-24
    assert ((larger - exact).abs() <= bound).all()
