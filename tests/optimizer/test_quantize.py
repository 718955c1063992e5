import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from optimizer.errors import NonFiniteError, SpecError
from optimizer.formats import BF16, E4M3, E5M2, FORMATS, FP16, FP32, Format
from optimizer.metrics import sqnr_db
from optimizer.quantize import (
    PIECE,
    PIECES_PER_THREAD,
    amax,
    check_finite,
    dequantize,
    fake_quantize,
    finite_amax,
    flushed_share,
    overflows,
    quantize,
    round_to_format,
    saturated_share,
    scale_from_amax,
    to_codes,
)
from optimizer.stack import Granularity
from tests.optimizer.numbers import (
    EIGHT_BITS,
    NARROW,
    ORACLES,
    assert_same_bits,
    by_definition,
    every_value,
    normal,
    scaled,
    ties_and_neighbors,
)

ONE = torch.ones(())
TENSOR, CHANNEL, TOKEN = Granularity.TENSOR, Granularity.CHANNEL, Granularity.TOKEN
HEAD, BLOCK = Granularity.HEAD, Granularity.BLOCK

every_format = pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.name)


def by_ml_dtypes(x: NDArray[np.float32], fmt: Format) -> Tensor:
    clipped = np.clip(x, -fmt.max, fmt.max, dtype=np.float32)
    return torch.from_numpy(clipped.astype(ORACLES[fmt.name]).astype(np.float32))


# Rounding


@every_format
def test_every_value_survives(fmt: Format) -> None:
    values = torch.from_numpy(every_value(fmt))
    assert_same_bits(round_to_format(values, fmt), values)


@every_format
def test_rounds_as_the_definition_at_every_tie_and_its_neighbors(fmt: Format) -> None:
    x = torch.from_numpy(ties_and_neighbors(fmt))
    assert_same_bits(round_to_format(x, fmt), by_definition(x, fmt))


@every_format
def test_rounds_as_ml_dtypes_whatever_the_bits(fmt: Format) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1_000_000, dtype=np.uint32)
    x = bits.view(np.float32)
    x = x[~np.isnan(x)]
    assert_same_bits(round_to_format(torch.from_numpy(x), fmt), by_ml_dtypes(x, fmt))


@pytest.mark.parametrize("fmt", [*NARROW, FP32], ids=lambda f: f.name)
def test_infinity_saturates_and_nan_stays_nan(fmt: Format) -> None:
    got = round_to_format(torch.tensor([torch.inf, -torch.inf, torch.nan]), fmt)
    assert got[:2].tolist() == [float(np.float32(fmt.max)), -float(np.float32(fmt.max))]
    assert got[2].isnan()


def test_fp32_is_left_alone() -> None:
    x = torch.tensor([1.0, -0.0, 1e-45, 3.4028235e38])
    assert_same_bits(round_to_format(x, FP32), x)


def test_tf32_is_refused() -> None:
    with pytest.raises(SpecError, match="tf32"):
        round_to_format(ONE, FORMATS["tf32"])


def test_what_requires_grad_can_be_rounded() -> None:
    x = torch.tensor([1.06], requires_grad=True)
    assert fake_quantize(x, ONE, E4M3).tolist() == [1.0]


# Case A3
def test_beyond_the_largest_number_saturates_and_is_counted() -> None:
    x = torch.tensor([448, 449, 464, 464.01, 1e9])
    assert quantize(x, ONE, E4M3).tolist() == [448.0] * 5
    assert to_codes(x, E4M3).tolist() == [0x7E] * 5
    assert saturated_share(x, ONE, E4M3) == 4 / 5


# Case A3
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("granularity", list(Granularity))
def test_non_finite_input_is_refused_by_name(
    bad: float, granularity: Granularity
) -> None:
    x = normal(4, 6, 3, 5) if granularity is HEAD else normal(24, 15)
    x.view(-1)[77] = bad
    with pytest.raises(NonFiniteError, match=r"layers\.3\.ffn_in"):
        finite_amax(x, granularity, "layers.3.ffn_in")
    with pytest.raises(NonFiniteError, match=r"layers\.3\.ffn_in"):
        check_finite(x, "layers.3.ffn_in")


# Case A4
def test_e5m2_never_becomes_infinite() -> None:
    x = torch.tensor([57344.0, 61439.99, 61440.0, 98304.0])
    assert quantize(x, ONE, E5M2).tolist() == [57344.0] * 4
    scale = scaled(x, TENSOR, E5M2)
    assert scale.item() == pytest.approx(98304 / 57344, rel=2**-24)
    assert fake_quantize(x, scale, E5M2).isfinite().all()


# Case A6
def test_fp32_goes_to_fp8_in_one_step() -> None:
    x = torch.tensor([1.0635])
    assert quantize(x, ONE, E4M3).item() == 1.125
    assert quantize(round_to_format(x, BF16), ONE, E4M3).item() == 1.0  # the wrong way
    x = normal(1_000_000)
    x *= 448 / x.abs().max()
    direct = by_ml_dtypes(x.numpy(), E4M3)
    twice = quantize(round_to_format(x, BF16), ONE, E4M3)
    assert_same_bits(quantize(x, ONE, E4M3), direct)
    # Three standard errors of a share of 3 % in a million: 0.05 points.
    assert (twice != direct).float().mean().item() == pytest.approx(0.0314, abs=5e-4)


# Case A12
def test_values_beyond_fp16_make_fp16_infeasible() -> None:
    hidden = torch.tensor([1.0, 66246.39])
    assert overflows(amax(hidden, TENSOR), FP16)
    assert not overflows(amax(hidden, TENSOR), BF16)
    assert not overflows(65504.0, FP16)
    assert not overflows(1e9, E4M3)  # a scale takes care of it
    assert round_to_format(hidden, BF16)[1] == 66048
    assert round_to_format(torch.tensor([65519.99]), FP16) == 65504


# Scales


# Case A1
def test_zero_groups_stay_zero_and_get_a_scale_of_one() -> None:
    weight = torch.zeros(256, 256)
    weight[0, 0] = 1
    for granularity in (TENSOR, CHANNEL, TOKEN, BLOCK):
        scale = scaled(weight, granularity, E4M3)
        assert scale.isfinite().all()
        assert (scale > 0).all()
        assert scale.flatten()[0].item() == 0.0022321429569274187  # float32(1 / 448)
        assert torch.equal(fake_quantize(weight, scale, E4M3), weight)
    nothing = torch.zeros(3, 4)
    assert scaled(nothing, TENSOR, E4M3) == 1
    assert_same_bits(fake_quantize(nothing, ONE, E4M3), nothing)


@pytest.mark.parametrize("fmt", EIGHT_BITS, ids=lambda f: f.name)
@pytest.mark.parametrize("top", [1e-45, 1e-38, 1.0, 3e38, 3.4028235e38])
def test_scale_is_usable_at_the_edges(fmt: Format, top: float) -> None:
    x = torch.tensor([[top, -top, 0.0]])
    scale = scaled(x, TOKEN, fmt)
    assert scale.isfinite().all()
    assert (scale > 0).all()
    assert fake_quantize(x, scale, fmt).isfinite().all()


def test_nan_never_hides_in_a_scale() -> None:
    assert scale_from_amax(torch.tensor(torch.nan), E4M3).isnan()


def test_wide_formats_have_scale_one() -> None:
    assert scale_from_amax(torch.tensor([[5.0], [0.0]]), BF16).tolist() == [[1], [1]]


def test_each_granularity_by_hand() -> None:
    x = torch.tensor([[1.0, -2.0], [-3.0, 0.5]])
    assert amax(x, TENSOR).item() == 3.0
    assert amax(x, CHANNEL).tolist() == [[2.0], [3.0]]
    assert amax(x, TOKEN).tolist() == [[2.0], [3.0]]
    heads = torch.stack([x, x * 10, x * 100])[None]  # (batch 1, heads 3, 2, 2)
    assert amax(heads, HEAD).flatten().tolist() == [3.0, 30.0, 300.0]
    assert amax(heads, HEAD).shape == (1, 3, 1, 1)


def test_ragged_blocks_are_blocks() -> None:
    x = normal(130, 300)
    got = amax(x, BLOCK)
    assert got.shape == x.shape
    for rows in (slice(0, 128), slice(128, 130)):
        for columns in (slice(0, 128), slice(128, 256), slice(256, 300)):
            assert (got[rows, columns] == x[rows, columns].abs().max()).all()


def test_an_expert_without_tokens_has_a_scale() -> None:
    assert scaled(torch.zeros(0, 8), TENSOR, E4M3) == 1
    assert scaled(torch.zeros(0, 8), TOKEN, E4M3).shape == (0, 1)
    assert fake_quantize(torch.zeros(0, 8), torch.ones(0, 1), E4M3).shape == (0, 8)


def test_channels_do_not_share_a_scale() -> None:
    x = normal(2, 4096) * torch.tensor([[1.0], [1e-4]])
    x_hat = fake_quantize(x, scaled(x, CHANNEL, E4M3), E4M3)
    for row, row_hat in zip(x, x_hat, strict=True):  # 31.5 dB: any Gaussian row
        assert sqnr_db(row, row_hat) == pytest.approx(31.5, abs=0.5)


# Case B4
@pytest.mark.parametrize(
    ("outlier", "sqnr", "zeros"),
    [(3000.0, 31.53, 0.0055), (30000.0, 28.04, 0.0528), (300000.0, 8.48, 0.485)],
)
def test_an_outlier_flushes_the_rest_of_its_tensor(
    outlier: float, sqnr: float, zeros: float
) -> None:
    x = normal(512, 256)
    x[0, 7] = outlier
    rest = torch.ones_like(x, dtype=torch.bool)
    rest[0, 7] = False
    scale = scaled(x, TENSOR, E4M3)
    x_hat = fake_quantize(x, scale, E4M3)
    assert sqnr_db(x[rest], x_hat[rest]) == pytest.approx(sqnr, abs=0.005)
    assert flushed_share(x, scale, E4M3) == pytest.approx(zeros, rel=0.01)
    per_token = fake_quantize(x, scaled(x, TOKEN, E4M3), E4M3)
    spared = slice(1, None)  # the outlier's own row is 1 of 512
    assert sqnr_db(x[spared], per_token[spared]) == pytest.approx(31.67, abs=0.05)


# Case B4
def test_e5m2_has_the_range_and_not_the_accuracy() -> None:
    x = normal(512, 256)
    x[0, 7] = 3000.0
    x_hat = fake_quantize(x, scaled(x, TENSOR, E5M2), E5M2)
    x[0, 7] = x_hat[0, 7] = 0.0
    assert sqnr_db(x, x_hat) == pytest.approx(25.52, abs=0.005)


# Case B10
def test_only_a_scale_per_tensor_depends_on_the_neighbors() -> None:
    alone = torch.tensor([[1.0, 0.3]])
    beside = torch.tensor([[1.0, 0.3], [100.0, 0.0]])

    def first_row(x: Tensor, granularity: Granularity) -> Tensor:
        return fake_quantize(x, scaled(x, granularity, E4M3), E4M3)[0]

    assert first_row(alone, TENSOR).tolist() == pytest.approx([1.0, 0.285714], rel=1e-5)
    assert first_row(beside, TENSOR).tolist() == pytest.approx(
        [1.0044643, 0.3069196], rel=1e-6
    )
    assert_same_bits(first_row(alone, TOKEN), first_row(beside, TOKEN))


def test_heads_do_not_share_a_scale() -> None:  # the numbers of case D1
    x = torch.tensor([[100.0, 1.0], [0.01, 0.02]]).view(1, 2, 1, 2)
    by_head = fake_quantize(x, scaled(x, HEAD, E4M3), E4M3)
    by_tensor = fake_quantize(x, scaled(x, TENSOR, E4M3), E4M3)
    assert by_head[0, 1, 0].tolist() == pytest.approx([0.01, 0.02], rel=2**-22)
    # 0.01 and 0.02 are 0.0448 and 0.0896 in units of the scale: 0.04296875, 0.0859375
    assert by_tensor[0, 1, 0].tolist() == pytest.approx(
        [0.0095912, 0.0191825], rel=1e-5
    )


# Pieces


@pytest.mark.parametrize("granularity", [TENSOR, TOKEN, BLOCK])
def test_pieces_do_not_show(granularity: Granularity) -> None:
    x = normal(700, 1000)  # PIECE is no multiple of a row
    assert x.numel() > 2 * PIECES_PER_THREAD * PIECE  # two threads share the work
    scale = scaled(x, granularity, E4M3)
    want = by_ml_dtypes((x / scale).numpy(), E4M3) * scale
    assert_same_bits(fake_quantize(x, scale, E4M3), want)


def test_rows_longer_than_a_piece_are_pieces() -> None:
    x = normal(3, PIECE + 5)
    scale = scaled(x, TOKEN, E4M3)
    assert_same_bits(quantize(x, scale, E4M3), by_ml_dtypes((x / scale).numpy(), E4M3))


def test_inference_mode_changes_nothing() -> None:
    x = normal(700, 1000)
    with torch.inference_mode():
        inside = quantize(x, ONE, E4M3)
    assert_same_bits(inside, quantize(x, ONE, E4M3))


def test_fake_quantize_is_quantize_then_dequantize() -> None:
    x = normal(2, 3, 5, 4) * 1e-3
    for fmt in (E4M3, E5M2, BF16):
        scale = scaled(x, HEAD, fmt)
        two_steps = dequantize(quantize(x, scale, fmt), scale)
        assert_same_bits(fake_quantize(x, scale, fmt), two_steps)


# Shares


def test_shares_by_hand() -> None:
    # in units of the scale: 449 saturates; 2^-10 is a tie that goes to zero
    x = torch.tensor([449.0, 448.0, 2**-10, 2**-9, 0.0]) * 2
    scale = torch.tensor(2.0)
    assert saturated_share(x, scale, E4M3) == 1 / 5
    assert flushed_share(x, scale, E4M3) == 1 / 4  # zero was zero before
    assert flushed_share(torch.zeros(3), scale, E4M3) == 0
    assert saturated_share(torch.zeros(0), scale, E4M3) == 0
