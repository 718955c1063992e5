"""Estimates: no figure beats physics, FP8 is taken where it buys time, reasons are given."""

import math
from dataclasses import replace

import pytest

from optimizer.architectures import PUBLISHED
from optimizer.configs import shape_of
from optimizer.cost import stack_cost
from optimizer.errors import HardwareError
from optimizer.estimate import BATCHES, Ask, Estimate, estimate
from optimizer.hardware import DEVICES, device
from optimizer.spec import LatencySla, Workload
from optimizer.stack import Component, ModelShape
from optimizer.uniform import NARROWED, uniforms

QWEN = PUBLISHED["qwen2-7b"].shape
CHAT = Workload(1, 512, 128)
FORMATS = ("bf16", "fp8_e4m3", "fp8_e5m2", "fp32")


def asked(
    name: str = "h100",
    workload: Workload = CHAT,
    model: ModelShape = QWEN,
    **more: object,
) -> Estimate:
    return estimate(Ask(model, device(name), workload, **more))  # type: ignore[arg-type]


def row(found: Estimate, name: str):  # type: ignore[no-untyped-def]
    return next(p for p in found.priced if p.name == name)


# --- uniform stacks ----------------------------------------------------------------

FP8 = {"fp8", "fp8_weight_only"}
E3 = {  # of the bug reports: what each architecture has of FP8
    "6.0": set(),
    "7.0": set(),
    "7.5": set(),
    "8.0": {"fp8_weight_only"},
    "8.6": {"fp8_weight_only"},
    "8.9": FP8,
    "9.0": FP8,
    "10.0": FP8,
    "12.0": FP8,
}


@pytest.mark.parametrize(
    "name", [n for n, d in DEVICES.items() if d.compute_capability]
)
def test_fp8_is_refused_or_weight_only_where_the_units_lack_it(name: str) -> None:
    found = asked(name)
    capability = found.ask.device.compute_capability
    runs = {p.name for p in found.priced} & FP8
    assert runs == E3.get(str(capability), FP8)
    for refused in FP8 - runs:
        assert found.refused[refused]


def test_embeddings_head_and_what_is_no_matrix_stay_in_16_bits() -> None:
    stacks = {u.name: u.stack for u in uniforms(QWEN, device("h100"), "any", FORMATS)}
    stack = stacks["fp8"]
    assert stack is not None
    narrow = {s.component for s, c in stack.choices.items() if c.is_narrow}
    assert narrow == NARROWED
    cached = stacks["fp8_kv_cache"]
    assert cached is not None
    more = {s.component for s, c in cached.choices.items() if c.is_narrow}
    assert more == NARROWED | {Component.KV_CACHE}


def odd(hidden: int, inner: int) -> ModelShape:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": 1000}
    heads = {"num_attention_heads": 4, "num_hidden_layers": 2}
    return shape_of({"model_type": "llama", **sizes, **heads})


def test_a_matrix_that_no_kernel_takes_stays_and_says_why() -> None:
    found = {u.name: u for u in uniforms(odd(64, 100), device("h100"), "any", FORMATS)}
    assert found["fp8"].stack is not None
    assert found["fp8"].kept == {
        "ffn_in": "N = 200 is not a multiple of 16",
        "ffn_out": "K = 100 is not a multiple of 16",
    }


def test_a_model_that_no_kernel_takes_is_refused() -> None:
    found = {u.name: u for u in uniforms(odd(60, 100), device("h100"), "any", FORMATS)}
    assert found["fp8"].stack is None
    assert found["fp8"].refused == "K = 60 is not a multiple of 16"


def test_formats_that_are_not_asked_for_are_refused() -> None:
    found = asked(formats=("bf16",))
    assert {p.name for p in found.priced} == {"fp32", "bf16"}
    assert not found.fp8.pays
    assert "not in search.formats" in found.fp8.said


@pytest.mark.parametrize(
    ("name", "fmt", "stack"),
    [
        ("b200", "fp4_e2m1", "fp4"),
        ("a100", "int4", "int4_weight_only"),
        ("a100", "int8", "int8"),
    ],
)
def test_formats_on_request_have_a_stack_where_the_device_has_them(
    name: str, fmt: str, stack: str
) -> None:
    assert stack not in {p.name for p in asked(name).priced}
    found = row(asked(name, formats=(*FORMATS, fmt)), stack)
    assert found.ledger.bytes_of("weights") < 10**10
    assert found.cost.per_token_s >= found.per_token.seconds


def test_a_device_without_a_format_on_request_says_so() -> None:
    found = asked("h100", formats=(*FORMATS, "fp4_e2m1"))
    assert "fp4" in found.refused


# --- physics -----------------------------------------------------------------------


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("batch", [1, 64])
def test_no_figure_is_under_the_physical_limit(name: str, batch: int) -> None:
    found = asked(name, Workload(batch, 512, 128))
    assert found.priced
    for p in found.priced:
        assert p.cost.per_token_s >= p.per_token.seconds, p.name
        assert p.cost.first_token_s >= p.first_token.seconds, p.name


def test_by_batch_is_the_same_sum_as_the_stacks_own() -> None:
    found = asked()
    for p in found.priced:
        if p.name in found.by_batch[0].per_token_s:
            assert found.by_batch[0].per_token_s[p.name] == pytest.approx(
                p.cost.per_token_s, rel=1e-12
            )


def test_rows_are_priced_by_the_cost_model() -> None:
    found = asked("l4", Workload(8, 300, 50))
    stacks = {u.name: u.stack for u in uniforms(QWEN, device("l4"), "any", FORMATS)}
    for p in found.priced:
        stack = stacks[p.name]
        assert stack is not None
        cost = stack_cost(QWEN, stack, device("l4"), Workload(8, 300, 50))
        assert p.cost.per_token_s == pytest.approx(cost.per_token_s, rel=1e-12)
        assert p.cost.first_token_s == pytest.approx(cost.first_token_s, rel=1e-12)
        assert p.cost.per_token.error == pytest.approx(cost.error, rel=1e-9)
        assert p.cost.per_token.basis is cost.basis
        assert p.cost.first_token.basis is cost.first_basis
        assert p.cost.per_token.shares == pytest.approx(cost.shares)


# --- memory ------------------------------------------------------------------------


def test_what_fits_is_what_the_ledger_says() -> None:
    for p in asked("t4", Workload(9, 512, 128)).priced:
        assert p.fits == (p.ledger.total_bytes <= 16_000_000_000)
        assert p.fits == (p.largest_batch >= 9)
        assert p.fits == (p.largest_context >= 640)


def test_room_is_what_the_caller_leaves() -> None:
    assert row(asked(max_memory_bytes=16 * 10**9), "bf16").fits
    small = asked(max_memory_bytes=10**10)
    assert not row(small, "bf16").fits
    assert row(small, "fp8").fits
    assert small.choice.stack == "fp8_weight_only"
    assert small.choice.reasons[0] == "bf16 does not fit the memory"
    assert (
        Ask(QWEN, device("t4"), CHAT, max_memory_bytes=2**50).room_bytes == 16 * 10**9
    )


def test_nothing_fits_a_small_device() -> None:
    found = asked("t4", model=PUBLISHED["llama-3.1-70b"].shape)
    assert found.choice.stack is None
    assert found.choice.reasons == ("no stack fits the memory",)


# --- FP8, and the choice -----------------------------------------------------------


def test_fp8_pays_for_qwen_on_an_h100() -> None:
    found = asked()
    assert found.fp8.pays
    assert found.fp8.from_batch == 1
    assert found.fp8.speedup is not None
    assert 1.2 < found.fp8.speedup <= 2
    assert found.choice.stack == "bf16"
    assert "POST /v1/optimize" in found.choice.reasons[-1]


def test_a_gain_within_the_error_is_told_as_such() -> None:
    # 135M parameters at batch 1 are all launch time.
    found = asked(model=PUBLISHED["smollm2-135m"].shape)
    assert not found.fp8.pays
    assert found.fp8.stack is not None
    assert found.choice.reasons[-1] == found.fp8.said


def test_weights_alone_buy_nothing_where_compute_is_the_limit() -> None:
    found = asked("a100", Workload(1024, 64, 8))
    assert found.fp8.speedup == pytest.approx(1)
    assert found.fp8.said.endswith("it buys no time at this batch size")
    assert found.fp8.from_batch == 1
    assert found.fp8.to_batch is not None
    assert found.fp8.to_batch < 1024


@pytest.mark.parametrize("name", ["v100", "t4", "p100"])
def test_where_there_is_no_fp8_the_reason_is_given(name: str) -> None:
    found = asked(name)
    assert not found.fp8.pays
    assert found.fp8.said == found.refused["fp8_weight_only"]
    assert found.fp8.from_batch is None


def test_a_target_that_16_bits_miss_is_met_by_the_least_loss() -> None:
    free = asked()
    between = (
        row(free, "bf16").cost.per_token_s
        + row(free, "fp8_weight_only").cost.per_token_s
    ) / 2
    found = asked(sla=LatencySla(per_token_s=between))
    assert not row(found, "bf16").meets
    assert found.choice.stack == "fp8_weight_only"
    assert found.choice.reasons[0] == "bf16 misses the target"


def test_a_target_that_nothing_meets_is_told_how_near_one_comes() -> None:
    found = asked(sla=LatencySla(first_token_s=1e-4))
    assert found.choice.stack is None
    assert "comes nearest" in found.choice.reasons[0]


def test_a_target_that_is_met_needs_nothing_narrow() -> None:
    found = asked(sla=LatencySla(per_token_s=1.0, first_token_s=10.0))
    assert found.choice.stack == "bf16"
    assert found.choice.reasons[0].startswith("bf16 fits and meets the target")


def test_the_least_limit_is_that_of_the_narrowest_stack() -> None:
    found = asked()
    each, first = found.fastest_limit
    assert each == row(found, "fp8_kv_cache").per_token
    assert first.seconds == row(found, "fp8").first_token.seconds


def test_a_device_without_16_bits_is_served_in_fp32() -> None:
    plain = replace(
        device("p100"),
        native=frozenset({"fp32"}),
        peak_flops={"fp32": 1e13},
    )
    found = estimate(Ask(PUBLISHED["gpt2"].shape, plain, CHAT))
    assert [p.name for p in found.priced] == ["fp32"]
    assert found.choice.stack == "fp32"


def test_a_device_that_multiplies_nothing_is_named() -> None:
    empty = replace(device("p100"), native=frozenset(), peak_flops={})
    with pytest.raises(HardwareError, match="NVIDIA P100 SXM2 runs no uniform stack"):
        estimate(Ask(QWEN, empty, CHAT))


def test_batches_are_compared_in_order() -> None:
    found = asked("b200")
    assert tuple(at.batch_size for at in found.by_batch) == BATCHES
    assert all(
        math.isfinite(s) for at in found.by_batch for s in at.per_token_s.values()
    )
