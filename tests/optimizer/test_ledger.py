"""Serving's memory: rows add up, every parameter counts once, and what fits is found."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from optimizer.architectures import PUBLISHED
from optimizer.configs import shape_of
from optimizer.cost import stack_cost
from optimizer.hardware import DEVICES
from optimizer.ledger import (
    CHUNK_TOKENS,
    Entry,
    Ledger,
    Served,
    kinds,
    matrices,
    served,
    vectors,
)
from optimizer.spec import Workload
from optimizer.stack import (
    LINEAR,
    Component,
    ModelShape,
    Stack,
    choice_named,
)
from tests.optimizer.test_configs import config_of

NAMES = sorted(PUBLISHED)
WORKLOADS = st.builds(
    Workload,
    batch_size=st.integers(1, 1024),
    prompt_tokens=st.integers(1, 131_072),
    output_tokens=st.integers(1, 131_072),
)


def stack_of(model: ModelShape, linear: str = "bf16", cache: str = "bf16") -> Stack:
    def name(component: Component) -> str:
        if component is Component.KV_CACHE:
            return cache
        narrow = component in LINEAR and component is not Component.LM_HEAD
        return linear if narrow else "bf16"

    sites = [s.site for s in model.sites]
    return Stack({s: choice_named(s.component, name(s.component)) for s in sites})


def serve(model: ModelShape, stack: Stack, ways: int = 1) -> Served:
    return served(model, kinds(model, stack), ways)


@given(sizes=st.lists(st.integers(0, 2**50)))
def test_a_table_adds_up(sizes: list[int]) -> None:
    ledger = Ledger(tuple(Entry(f"row {i}", n, "") for i, n in enumerate(sizes)))
    assert ledger.total_bytes == sum(sizes)
    assert sum(ledger.bytes_of(e.name) for e in ledger.entries) == ledger.total_bytes


@given(name=st.sampled_from(NAMES), workload=WORKLOADS, ways=st.sampled_from([1, 2, 8]))
def test_rows_of_serving_add_up(name: str, workload: Workload, ways: int) -> None:
    model = PUBLISHED[name].shape
    ledger = serve(model, stack_of(model), ways).ledger(workload)
    rows = {e.name: e.bytes for e in ledger.entries}
    assert sum(rows.values()) == ledger.total_bytes
    assert rows.keys() == {"weights", "kv_cache", "activations"}
    assert ledger.devices == ways


@pytest.mark.parametrize("name", NAMES)
def test_bf16_weights_are_two_bytes_for_each_parameter(name: str) -> None:
    model = PUBLISHED[name].shape
    assert serve(model, stack_of(model)).weight_bytes == 2 * model.parameters


def test_fp8_weights_by_hand() -> None:
    # Qwen2-7B: the layers' matrices at one byte each, and one fp32 scale for each of
    # 4 × 28 sites; table, head, norms and biases at two bytes.
    model = PUBLISHED["qwen2-7b"].shape
    layers = 28 * (2 * 3584**2 + 2 * 512 * 3584 + 3 * 18944 * 3584)
    other = model.parameters - layers
    assert (
        serve(model, stack_of(model, "fp8_e4m3")).weight_bytes
        == layers + 4 * 4 * 28 + 2 * other
    )


def test_a_head_that_is_narrowed_alone_is_a_tensor_of_its_own() -> None:
    model = PUBLISHED["smollm2-135m"].shape
    stack = stack_of(model)
    head = model.sites[-1].site
    narrow = choice_named(Component.LM_HEAD, "fp8_e4m3")
    apart = Stack({**stack.choices, head: narrow})
    more = serve(model, apart).weight_bytes - serve(model, stack).weight_bytes
    assert more == 49152 * 576 + 4


def test_the_cache_is_grouped_heads_times_tokens() -> None:
    # Qwen2-7B: 28 layers × K and V × 4 heads × 128 × 2 bytes = 57,344 bytes a token.
    model = PUBLISHED["qwen2-7b"].shape
    workload = Workload(batch_size=16, prompt_tokens=900, output_tokens=100)
    ledger = serve(model, stack_of(model)).ledger(workload)
    assert ledger.bytes_of("kv_cache") == 57_344 * 1000 * 16
    halved = serve(model, stack_of(model, cache="fp8_e4m3")).ledger(workload)
    assert halved.bytes_of("kv_cache") == 57_344 * 1000 * 16 // 2


def test_windows_bound_the_cache() -> None:
    # Gemma 3 1B: 26 layers, K and V of one head of 256; every sixth sees all.
    model = PUBLISHED["gemma-3-1b"].shape
    tokens = serve(model, stack_of(model)).cache_bytes(10_000)
    assert tokens == 2 * 256 * 2 * (22 * 512 + 4 * 10_000)


@pytest.mark.parametrize("name", NAMES)
def test_the_cost_model_counts_the_same_matrices_and_cache(name: str) -> None:
    model = PUBLISHED[name].shape
    stack, workload = stack_of(model), Workload(8, 700, 300)
    cost = stack_cost(model, stack, DEVICES["h100"], workload)
    ledger = serve(model, stack).ledger(workload)
    assert ledger.bytes_of("weights") - cost.weight_bytes == 2 * vectors(model)
    assert ledger.bytes_of("kv_cache") == cost.kv_bytes


def test_two_devices_hold_half_of_every_matrix_and_all_norms() -> None:
    model = PUBLISHED["qwen2-7b"].shape
    one, two = (serve(model, stack_of(model), ways) for ways in (1, 2))
    held = sum(s.weight_elements for s in matrices(model))
    assert two.weight_bytes == held + 2 * vectors(model)
    assert two.cache_bytes(1000) == one.cache_bytes(1000) / 2


def test_more_devices_than_heads_hold_a_head_each() -> None:
    model = PUBLISHED["qwen2-7b"].shape
    assert serve(model, stack_of(model), 8).cache_bytes(1) == 57_344 // 4


def test_activations_stop_growing_with_the_chunk() -> None:
    # Widest: gate and up, 3584 in and 2·18944 out, beside the stream; bf16.
    model = PUBLISHED["qwen2-7b"].shape
    held = serve(model, stack_of(model))
    token = 2 * (3584 + 3584 + 2 * 18_944)
    assert held.working_bytes(1, 131_072) == CHUNK_TOKENS * token + 4 * 152_064
    assert held.working_bytes(1, 10) == 10 * token + 4 * 152_064


@given(
    name=st.sampled_from(["qwen2-7b", "gemma-3-1b", "mixtral-8x7b"]),
    workload=WORKLOADS,
    room=st.integers(0, 192 * 10**9),
)
def test_the_largest_batch_fits_and_one_more_does_not(
    name: str, workload: Workload, room: int
) -> None:
    model = PUBLISHED[name].shape
    held = serve(model, stack_of(model))

    def needed(batch: int) -> int:
        return held.ledger(replace(workload, batch_size=batch)).total_bytes

    largest = held.largest_batch(workload, room)
    assert largest == 0 or needed(largest) <= room
    assert needed(largest + 1) > room


@given(workload=WORKLOADS, room=st.integers(0, 192 * 10**9), limit=st.integers(0, 9999))
def test_the_largest_context_fits_and_one_more_token_does_not(
    workload: Workload, room: int, limit: int
) -> None:
    model = PUBLISHED["qwen2-7b"].shape
    held = serve(model, stack_of(model))

    def needed(tokens: int) -> int:
        prompt = tokens - workload.output_tokens
        return held.ledger(replace(workload, prompt_tokens=prompt)).total_bytes

    found = held.largest_context(workload, room, limit)
    if found:
        assert needed(found) <= room
        assert found == limit or needed(found + 1) > room
    elif not limit or limit > workload.output_tokens:
        assert needed(workload.output_tokens + 1) > room


def test_an_encoder_has_no_cache() -> None:
    model = shape_of(config_of("BertForMaskedLM"))
    assert serve(model, stack_of(model)).cache_bytes(100) == 0
    assert serve(model, stack_of(model)).weight_bytes == 2 * model.parameters


def test_a_network_without_a_head_shares_nothing() -> None:
    model = shape_of(config_of("Gemma2ForCausalLM"))
    headless = replace(model, sites=model.sites[:-1])
    assert serve(headless, stack_of(headless)).weight_bytes == 2 * model.parameters
