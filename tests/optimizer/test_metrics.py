import math

import numpy as np
import pytest
import torch

from optimizer.errors import DatasetError
from optimizer.formats import BF16
from optimizer.metrics import (
    bootstrap_interval,
    logits_kl_nats,
    perplexity,
    sqnr_db,
    token_nll,
    top1_agrees,
)
from optimizer.quantize import round_to_format


def test_one_percent_of_noise_is_40_db() -> None:
    x = torch.ones(100, dtype=torch.float64)
    assert sqnr_db(x, x * 1.01) == pytest.approx(40.0, abs=1e-9)


def test_no_noise_is_infinite_and_noise_on_nothing_is_minus_infinite() -> None:
    zero, one = torch.zeros(3), torch.ones(3)
    assert sqnr_db(one, one) == math.inf
    assert sqnr_db(zero, zero) == math.inf
    assert sqnr_db(zero, one) == -math.inf


def test_kl_of_a_model_with_itself_is_zero() -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    assert (logits_kl_nats(logits, logits) == 0).all()


def test_kl_by_hand_and_its_direction() -> None:
    fair = torch.tensor([[0.5, 0.5]]).log()
    loaded = torch.tensor([[0.9, 0.1]]).log()
    rel = 1e-6  # float32 logarithms
    assert logits_kl_nats(fair, loaded).tolist() == pytest.approx(
        [0.5 * math.log(0.25 / 0.09)], rel=rel
    )
    assert logits_kl_nats(loaded, fair).tolist() == pytest.approx(
        [0.9 * math.log(9) + math.log(0.2)], rel=rel
    )


def test_a_small_kl_keeps_its_digits() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(2, 7, 1000, generator=generator) * 4
    logits = reference + torch.randn(2, 7, 1000, generator=generator) * 1e-4
    log_p = reference.double().log_softmax(-1)
    log_q = logits.double().log_softmax(-1)
    exact = (log_p.exp() * (log_p - log_q)).sum(-1)
    got = logits_kl_nats(reference, logits)
    assert exact.max() < 1e-8  # where the difference of two float32 logs is noise
    # e^d - 1 is rounded to 2^-24 d, and d²/2 of it counts: 2^-23 / d = 0.12 % of it.
    torch.testing.assert_close(got.double(), exact, rtol=2**-23 / 1e-4, atol=0)


# Case A16
def test_probabilities_are_computed_in_float32() -> None:
    logits = torch.tensor([[[100.0, 100.25], [0.0, 0.0]]])
    token = torch.tensor([[0, 1]])
    assert token_nll(logits, token).exp().item() == pytest.approx(1 / 0.56218, rel=1e-5)
    lost = round_to_format(logits, BF16)  # bf16 logits cannot tell the two apart
    assert token_nll(lost, token).item() == pytest.approx(math.log(2))
    equal = torch.full((1, 2, 1000), 100.0)
    # A bf16 softmax has p = 0.00099945, which would be a perplexity of 1000.55.
    assert token_nll(equal, token).exp().item() == pytest.approx(1000, rel=1e-5)


# Case A17
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_losses_do_not_stall_the_sum(dtype: torch.dtype) -> None:
    nll = torch.full((5000,), 2.3, dtype=dtype)  # a bf16 sum stops at 1024
    scored = torch.ones(5000, dtype=torch.bool)
    assert perplexity(nll, scored) == pytest.approx(math.exp(nll[0].item()), rel=1e-12)


# Case A18
@pytest.mark.parametrize("pad", [9.0, 0.0, math.nan])
@pytest.mark.parametrize("left", [False, True])
def test_perplexity_weighs_tokens_and_never_counts_padding(
    pad: float, left: bool
) -> None:
    short, long = [1.0] * 2, [3.0] * 6
    padding, unscored = [pad] * 4, [False] * 4
    row = padding + short if left else short + padding
    mask = unscored + [True] * 2 if left else [True] * 2 + unscored
    nll, scored = torch.tensor([row, long]), torch.tensor([mask, [True] * 6])
    assert perplexity(nll, scored) == pytest.approx(math.exp(20 / 8))


# Case A18
def test_a_true_end_of_text_counts_though_padding_looks_the_same() -> None:
    nll = torch.tensor([1.0, 1.0, 4.0, 4.0])  # token, token, end of text, padding
    scored = torch.tensor([True, True, True, False])
    assert perplexity(nll, scored) == pytest.approx(math.exp(2))


# Case A18
def test_ten_tokens_are_nine_predictions() -> None:
    # Each next token has probability e^-2, the other token the rest.
    p = math.exp(-2)
    tokens = torch.tensor([[0, 1] * 5])
    logits = torch.tensor([[p, 1 - p]]).log().repeat(10, 1)
    logits[0::2] = logits[0::2].flip(-1)  # position 0 is followed by token 1
    nll = token_nll(logits[None], tokens)
    assert nll.shape == (1, 9)
    scored = torch.ones_like(nll, dtype=torch.bool)
    assert perplexity(nll, scored) == pytest.approx(math.exp(2), rel=1e-6)


def test_perplexity_of_padding_alone_is_refused() -> None:
    with pytest.raises(DatasetError, match="padding"):
        perplexity(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool))


def test_top1_agrees_token_by_token() -> None:
    ours = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    theirs = torch.tensor([[0.0, 9.0], [0.0, 1.0]])
    assert top1_agrees(ours, theirs).tolist() == [True, False]


# Bootstrap


def test_interval_of_independent_tokens_is_the_textbook_one() -> None:
    values = np.random.default_rng(0).normal(size=2000)
    low, high = bootstrap_interval(values, block=1, samples=4000, seed=1)
    half = 1.96 * values.std() / math.sqrt(2000)
    # A 2.5 % quantile of 4000 samples has a standard error of 4 % of half the width.
    assert low == pytest.approx(values.mean() - half, abs=0.12 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.12 * half)


def test_neighbors_that_move_together_widen_the_interval() -> None:
    values = np.random.default_rng(0).normal(size=200).repeat(10)
    # Ten equal neighbors are one observation: the width grows by √10.
    low, high = bootstrap_interval(values, block=1, samples=2000, seed=1)
    wide_low, wide_high = bootstrap_interval(values, block=50, samples=2000, seed=1)
    # The width of 2000 samples is known to ±5 %, blocks add as much.
    ratio = (wide_high - wide_low) / (high - low)
    assert ratio == pytest.approx(math.sqrt(10), rel=0.2)


def test_interval_repeats_by_seed_and_narrows_with_confidence() -> None:
    values = np.arange(100.0)
    first = bootstrap_interval(values, block=8, samples=500, seed=3)
    assert bootstrap_interval(values, block=8, samples=500, seed=3) == first
    assert bootstrap_interval(values, block=8, samples=500, seed=4) != first
    low, high = bootstrap_interval(values, 8, samples=500, seed=3, confidence=0.5)
    assert first[0] < low < high < first[1]


@pytest.mark.parametrize("block", [1, 7, 64])  # 64: longer than the text
def test_a_constant_has_no_width(block: int) -> None:
    low, high = bootstrap_interval(np.full(20, 0.25), block, samples=50, seed=0)
    assert (low, high) == (0.25, 0.25)
