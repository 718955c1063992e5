"""Physical limits by hand: bytes over bandwidth, products over the dense peak."""

from typing import Any

import pytest

from optimizer.architectures import PUBLISHED
from optimizer.configs import shape_of
from optimizer.hardware import device
from optimizer.ledger import kinds
from optimizer.limits import Limit, Term, limits
from optimizer.spec import Workload
from tests.optimizer.test_configs import config_of
from tests.optimizer.test_ledger import stack_of

QWEN = PUBLISHED["qwen2-7b"].shape
LAYERS = 28 * (2 * 3584**2 + 2 * 512 * 3584 + 3 * 18_944 * 3584)  # their matrices
HEAD = 152_064 * 3584


def found(name: str, workload: Workload, *formats: str, on: str = "h100") -> Any:
    model = PUBLISHED[name].shape
    return limits(kinds(model, stack_of(model, *formats)), device(on), workload)


def test_a_decode_step_reads_every_matrix_but_the_table() -> None:
    each, _ = found("qwen2-7b", Workload(1, 512, 128))
    # K and V: 57,344 bytes a token (test_ledger), 576 tokens on average.
    assert each.weight_bytes == 2 * (LAYERS + HEAD)
    assert each.cache_bytes == 57_344 * 576
    assert each.term is Term.BANDWIDTH
    seconds = (2 * (LAYERS + HEAD) + 57_344 * 576) / 3.35e12
    assert each.seconds == pytest.approx(seconds, rel=1e-12)
    assert seconds == pytest.approx(4.23e-3, rel=1e-3)


def test_fp8_halves_what_the_layers_read() -> None:
    each, _ = found("qwen2-7b", Workload(1, 512, 128), "fp8_e4m3")
    assert each.weight_bytes == LAYERS + 2 * HEAD


def test_a_prompt_is_bound_by_its_products() -> None:
    batch, prompt = 4, 1000
    _, first = found("qwen2-7b", Workload(batch, prompt, 1))
    linear = 2 * batch * (prompt * LAYERS + HEAD)
    attention = 28 * 2 * 2 * batch * (prompt * (prompt + 1) / 2) * 3584
    assert first.flops == linear + attention
    assert first.term is Term.COMPUTE
    assert first.seconds == pytest.approx((linear + attention) / 989.4e12, rel=1e-12)
    assert first.cache_bytes == 0


def test_weight_only_multiplies_at_the_rate_of_16_bits() -> None:
    workload = Workload(1, 8192, 1)
    bf16, only = (
        found("qwen2-7b", workload, f)[1].seconds
        for f in ("bf16", "fp8_e4m3_weight_only")
    )
    assert only == bf16
    assert found("qwen2-7b", workload, "fp8_e4m3")[1].seconds < bf16


def test_a_window_bounds_what_is_read() -> None:
    # Mistral 7B looks 4096 tokens back: 32 layers, K and V, 8 heads of 128, bf16.
    each, _ = found("mistral-7b", Workload(1, 20_000, 100))
    assert each.cache_bytes == 32 * 2 * 8 * 128 * 2 * 4096


def test_one_token_reads_the_experts_it_goes_to_and_many_read_all() -> None:
    one, _ = found("mixtral-8x7b", Workload(1, 10, 1))
    many, _ = found("mixtral-8x7b", Workload(1024, 10, 1))
    experts = 32 * 8 * 3 * 4096 * 14_336 * 2
    assert many.weight_bytes - one.weight_bytes == pytest.approx(0.75 * experts)


def test_two_devices_halve_the_limit() -> None:
    one, _ = found("qwen2-7b", Workload(1, 512, 128))
    two, _ = found("qwen2-7b", Workload(1, 512, 128, tensor_parallel=2))
    assert two.seconds == pytest.approx(one.seconds / 2)


def test_an_encoder_has_a_limit_without_a_cache() -> None:
    model = shape_of(config_of("BertForMaskedLM"))
    each, _ = limits(kinds(model, stack_of(model)), device("h100"), Workload(1, 8, 1))
    assert each.cache_bytes == 0
    assert each.seconds > 0


def test_a_limit_says_what_sets_it() -> None:
    h100 = device("h100")
    read = Limit(4e-3, Term.BANDWIDTH, 14_200_000_000, 30_000_000, 10)
    assert read.said(h100) == "14.2 GB of weights and 0.03 GB of KV cache at 3350 GB/s"
    multiplied = Limit(1.0, Term.COMPUTE, 0, 0, 989_000_000_000_000)
    assert multiplied.said(h100) == "989 TFLOP at the dense peak of NVIDIA H100 SXM5"
