"""A site's seconds and bytes: from which source, averaged over what, on how many GPUs."""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from optimizer import kernels, roofline
from optimizer.cost import (
    CONTEXTS,
    HOST_S,
    REDUCE_S,
    SiteCost,
    share,
    site_cost,
    steps,
)
from optimizer.errors import HardwareError
from optimizer.fits import fit
from optimizer.grid import grid
from optimizer.hardware import DEVICES, Device, device
from optimizer.kernels import Basis, Tables
from optimizer.roofline import Frame, Step
from optimizer.rules import refusals
from optimizer.spec import SWEPT_FORMATS, Workload
from optimizer.stack import (
    CHOICES,
    WHOLE_MODEL,
    Choice,
    Component,
    ModelShape,
    Site,
    SiteShape,
    choice_named,
)
from optimizer.timing import ATTENTION, WEIGHT_ONLY_ERROR

H100 = device("h100")
# A worker's own device: no efficiency is taken off, so the roof is what it says.
ROOF = Device(
    id="local",
    name="roof",
    compute_capability="9.0",
    peak_flops=H100.peak_flops,
    bandwidth_bytes_s=H100.bandwidth_bytes_s,
    memory_bytes=H100.memory_bytes,
    native=H100.native,
    link_bytes_s=4.5e11,
)
ONE = Workload(batch_size=1, prompt_tokens=512, output_tokens=128)


def linear(n: int, k: int, component: Component = Component.FFN_IN) -> SiteShape:
    return SiteShape(Site(0, component), n=n, k=k, weight_elements=n * k)


def attention(component: Component, window: int | None = None) -> SiteShape:
    return SiteShape(
        Site(0, component), heads=32, kv_heads=8, head_dim=128, window=window
    )


MODEL = ModelShape(
    architecture="Toy",
    layers=1,
    hidden=512,
    vocab=1600,
    max_context=8192,
    parameters=0,
    stored_bytes=0,
    tied_embeddings=False,
    sites=(),
)


def cost(
    shape: SiteShape,
    name: str,
    where: Device = H100,
    workload: Workload = ONE,
    tables: Tables | None = None,
) -> SiteCost:
    choice = choice_named(shape.site.component, name)
    return site_cost(shape, choice, where, workload, MODEL, tables=tables)


def decode_s(
    shape: SiteShape, name: str, where: Device = H100, workload: Workload = ONE
) -> float:
    return cost(shape, name, where, workload).per_token_s


def prefill_s(
    shape: SiteShape, name: str, where: Device = H100, workload: Workload = ONE
) -> float:
    return cost(shape, name, where, workload).first_token_s


# What was measured

# Output × input features, µs of one token in bf16 and in FP8 with a scale for each
# token: vLLM 0.24 on an H100 (aiconfigurator-core 0.12).
GEMMS_US = [
    (4096, 4096, 15.1, 13.8),
    (4608, 3584, 14.0, 13.2),  # Qwen2-7B's qkv, then its gate and up, then down
    (37888, 3584, 94.0, 51.0),
    (3584, 18944, 51.0, 33.0),
]


@pytest.mark.parametrize(("n", "k", "bf16_us", "fp8_us"), GEMMS_US)
def test_seconds_are_those_that_were_measured(
    n: int, k: int, bf16_us: float, fp8_us: float
) -> None:
    for name, us in (("bf16", bf16_us), ("fp8_e4m3_token", fp8_us)):
        found = cost(linear(n, k), name)
        # Between the grid's points, so not to the digit.
        assert found.per_token_s * 1e6 == pytest.approx(us, rel=0.03)
        assert found.basis is Basis.KERNELS
        assert found.error < 0.05


def test_fp8_is_slower_than_bf16_on_a_b200_at_4096() -> None:
    b200 = device("b200")
    square = linear(4096, 4096)
    assert decode_s(square, "bf16", b200) * 1e6 == pytest.approx(9.7, rel=0.01)
    assert decode_s(square, "fp8_e4m3_token", b200) * 1e6 == pytest.approx(
        24.7, rel=0.01
    )


def test_a_scale_known_beforehand_saves_looking_for_it() -> None:
    found = kernels.tables("h100")
    assert found is not None
    known, sought = (found.quantize(1, 4096, dynamic=d) for d in (False, True))
    assert known is not None
    assert sought is not None
    square = linear(4096, 4096)
    saved = decode_s(square, "fp8_e4m3_token") - decode_s(square, "fp8_e4m3")
    assert saved == pytest.approx(sought.seconds - known.seconds)
    assert saved > 0


def test_what_was_not_measured_says_so_and_follows_what_was() -> None:
    square = linear(4096, 4096)
    for name, near in (("fp8_e5m2", "fp8_e4m3"), ("fp8_e4m3_weight_only", "bf16")):
        found = cost(square, name)
        assert found.basis is Basis.ROOFLINE
        assert found.error > 0.05
        bare = replace(H100, id="unmeasured")  # the roofline alone, of the same family
        ratio = decode_s(square, near) / decode_s(square, near, bare)
        assert found.per_token_s == pytest.approx(decode_s(square, name, bare) * ratio)
    assert decode_s(square, "fp8_e5m2") == pytest.approx(decode_s(square, "fp8_e4m3"))


def test_weights_alone_are_uncertain_and_say_so() -> None:
    # Held against int8 weights that were timed on an A100, a fifth at the median.
    for where in (H100, device("a100")):
        found = cost(linear(4096, 4096), "fp8_e4m3_weight_only", where)
        assert found.error == WEIGHT_ONLY_ERROR == 0.2


def test_a_vocabulary_beyond_the_grid_follows_its_edge() -> None:
    # 152064 × 3584 in bf16 are 1.09 GB: 325 µs at 3350 GB/s, whatever the grid's last
    # row of 65536 took (159 µs).
    head = linear(152_064, 3584, Component.LM_HEAD)
    found = cost(head, "bf16")
    assert found.basis is found.first_basis is Basis.ROOFLINE
    assert 325e-6 < found.per_token_s < 1.25 * 325e-6


def test_experts_are_the_rooflines() -> None:
    routed = replace(linear(4096, 4096), active_share=0.25)
    assert cost(routed, "bf16").basis is Basis.ROOFLINE
    bare = replace(H100, id="unmeasured")
    assert decode_s(routed, "bf16") == decode_s(routed, "bf16", bare)


def test_an_older_architecture_has_the_nearest_ones_fit() -> None:
    for name in ("v100", "t4", "p100"):
        found = cost(linear(4096, 4096), "fp16", device(name))
        assert found.basis is Basis.ROOFLINE
        # The memory alone: 33.6 MB.
        assert found.per_token_s > 2 * 4096**2 / device(name).bandwidth_bytes_s


# Tables by hand

SECONDS = 40e-6  # of every kernel


def flat(
    formats: Mapping[str, float], casts: Mapping[str, float] | None = None
) -> Tables:
    """Kernels that take as long whatever their size, between 1 and 8192."""
    ends = [[1, 4096, 8192]] * 3
    return Tables(
        device="h100",
        engine="toy",
        version="1",
        basis=Basis.MEASURED,
        origin="this test",
        gemms={f: grid(ends, np.full((3, 3, 3), s)) for f, s in formats.items()},
        casts={
            name: grid(ends[:2], np.full((3, 3), s))
            for name, s in (casts or {}).items()
        },
        reductions={2: grid([[256, 4096, 8192]], np.full(3, 9e-6))},
    )


def test_tables_that_are_given_come_first() -> None:
    found = cost(linear(100, 100), "bf16", tables=flat({"bf16": SECONDS}))
    assert found.basis is found.first_basis is Basis.MEASURED
    assert found.per_token_s == found.first_token_s == pytest.approx(SECONDS)
    assert found.error == 0.0


def test_without_a_timed_pass_a_static_scale_follows_the_dynamic_one() -> None:
    given = flat({"bf16": SECONDS, "fp8": SECONDS})
    site = linear(4096, 4096)
    assert cost(site, "fp8_e4m3_token", tables=given).per_token_s == SECONDS
    found = cost(site, "fp8_e4m3", tables=given)
    assert found.basis is Basis.ROOFLINE
    passes = flat({"fp8": SECONDS}, {"static": 2e-6, "dynamic": 5e-6})
    assert cost(site, "fp8_e4m3", tables=passes).per_token_s == pytest.approx(37e-6)


def test_no_figure_is_under_the_physical_limit() -> None:
    # Tables that promise a nanosecond are wrong; the weights alone take 10 µs.
    found = cost(linear(4096, 4096), "bf16", tables=flat({"bf16": 1e-9}))
    assert found.per_token_s == pytest.approx(2 * 4096**2 / H100.bandwidth_bytes_s)


@pytest.mark.parametrize("where", DEVICES.values(), ids=DEVICES)
def test_every_candidate_has_a_cost_on_every_device(where: Device) -> None:
    shapes = [linear(4096, 4096), *(attention(c) for c in ATTENTION)]
    for shape in shapes:
        answers = refusals(where, "any", shape, SWEPT_FORMATS)
        for choice in [c for c, no in answers.items() if no is None]:
            found = cost(shape, choice.name, where)
            assert 0 <= found.per_token_s < math.inf
            assert 0 <= found.first_token_s < math.inf
            assert 0 <= found.error < 1


# Attention


def kernel_s(
    cache: str,
    workload: Workload = ONE,
    where: Device = H100,
    window: int | None = None,
) -> tuple[float, float]:
    """Return seconds of a layer's attention but for the writing of its cache."""
    every = [cost(attention(Component.KV_CACHE, window), cache, where, workload)]
    every += [
        cost(attention(c, window), "bf16", where, workload)
        for c in (Component.ATTN_SCORES, Component.ATTN_VALUES)
    ]
    return (
        sum(c.per_token_s for c in every) - written_s(workload, 1, cache),
        sum(c.first_token_s for c in every)
        - written_s(workload, workload.prompt_tokens, cache),
    )


def written_s(workload: Workload, queries: int, cache: str) -> float:
    shape = attention(Component.KV_CACHE)
    step = Step(workload.batch_size, queries, 1)
    choice = choice_named(Component.KV_CACHE, cache)
    return roofline.written_s(shape, choice, H100, step, Frame(512), fit(H100))


@pytest.mark.parametrize(("cache", "fmt"), [("bf16", "bf16"), ("fp8_e4m3", "fp8")])
def test_the_sites_of_attention_add_up_to_the_kernel(cache: str, fmt: str) -> None:
    known = kernels.tables("h100")
    assert known is not None
    for workload in (ONE, Workload(16, 1000, 500)):
        sizes = (32, 8, 128)
        decode = [
            known.generation_attention(fmt, s.sequences, round(s.context), *sizes)
            for s in steps(workload)[1]
        ]
        first = known.context_attention(
            fmt, workload.batch_size, workload.prompt_tokens, *sizes
        )
        per_token_s, first_token_s = kernel_s(cache, workload)
        mean = sum(t.seconds for t in decode if t) / CONTEXTS
        assert per_token_s == pytest.approx(mean, rel=0.02)
        assert first is not None
        # Where a kernel is not slower in FP8 than in bf16, nothing is given back.
        assert first_token_s == pytest.approx(first.seconds, rel=0.05)


def test_attention_that_was_not_measured_follows_a_smaller_one() -> None:
    large = Workload(512, 8192, 128)  # 4 million tokens: beyond the tables
    for component in ATTENTION:
        found = cost(attention(component), "bf16", workload=large)
        assert found.first_basis is Basis.ROOFLINE
        assert found.first_token_s > 0
    assert cost(attention(Component.KV_CACHE), "bf16").basis is Basis.KERNELS


def test_fp8_products_in_attention_were_not_measured() -> None:
    found = cost(attention(Component.ATTN_SCORES), "fp8_e4m3")
    assert found.basis is Basis.ROOFLINE
    assert decode_s(attention(Component.ATTN_SCORES), "bf16") < found.per_token_s


def test_an_e5m2_cache_is_timed_as_e4m3_and_says_that_it_was_not() -> None:
    one, other = (
        cost(attention(Component.KV_CACHE), name) for name in ("fp8_e4m3", "fp8_e5m2")
    )
    assert one.per_token_s == other.per_token_s
    assert (one.basis, other.basis) == (Basis.KERNELS, Basis.ROOFLINE)


def test_a_wide_cache_is_the_rooflines_by_the_kernels_ratio() -> None:
    found = cost(attention(Component.KV_CACHE), "fp32", workload=Workload(8, 4000, 0))
    assert found.basis is Basis.ROOFLINE
    half = decode_s(
        attention(Component.KV_CACHE), "bf16", workload=Workload(8, 4000, 0)
    )
    assert found.per_token_s > 1.5 * half


def test_attention_without_any_times_is_the_roofline() -> None:
    odd = replace(attention(Component.KV_CACHE), head_dim=72)
    assert cost(odd, "bf16").basis is Basis.ROOFLINE


# The growing context


def test_decode_is_the_mean_over_the_growing_context() -> None:
    prefill, decode = steps(Workload(3, 512, 128))
    assert (prefill.sequences, prefill.queries, prefill.context) == (3, 512, 512)
    contexts = [s.context for s in decode]
    # Five equal parts of 128 tokens, each at its middle.
    assert contexts == pytest.approx([524.8, 550.4, 576.0, 601.6, 627.2])
    assert {(s.sequences, s.queries) for s in decode} == {(3, 1)}


def test_a_context_that_passes_the_window_is_cheaper_than_its_middle_says() -> None:
    # From 0 to 1000 tokens under a window of 500: the mean is not that of the middle,
    # 500, but less: half of the steps see fewer.
    long = Workload(1, 1, 1000)
    cache = attention(Component.KV_CACHE, window=500)
    middle = attention(Component.KV_CACHE)
    assert decode_s(cache, "bf16", ROOF, long) < decode_s(
        middle, "bf16", ROOF, Workload(1, 500, 0)
    )


# Launches by the host


def test_without_graphs_the_host_sets_the_pace_of_small_kernels() -> None:
    eager = replace(ONE, cuda_graphs=False)
    small = linear(512, 512)
    assert decode_s(small, "bf16", workload=eager) == HOST_S
    assert decode_s(small, "fp8_e4m3", workload=eager) == 2 * HOST_S
    # A prompt keeps the device busy longer than the host.
    busy = replace(eager, batch_size=64, prompt_tokens=2048)
    assert prefill_s(linear(37888, 3584), "bf16", workload=busy) == prefill_s(
        linear(37888, 3584), "bf16", workload=replace(busy, cuda_graphs=True)
    )


# Several GPUs


def test_each_gpu_has_its_share_of_a_site() -> None:
    up, down = linear(4096, 512), linear(512, 4096, Component.FFN_OUT)
    assert (share(up, 4).n, share(up, 4).k) == (1024, 512)
    assert (share(down, 4).n, share(down, 4).k) == (512, 1024)
    assert share(down, 4).weight_elements == 512 * 1024
    heads = share(attention(Component.KV_CACHE), 16)
    assert (heads.heads, heads.kv_heads) == (2, 1)  # 8 KV heads on 16: one each
    act = share(SiteShape(Site(0, Component.FFN_ACT), elements=1000), 3)
    assert act.elements == 334
    norms = SiteShape(Site(0, Component.NORMS), elements=1024)
    assert share(norms, 4) is norms
    assert share(up, 1) is up


def test_gpus_add_up_what_they_have_after_the_second_matrix() -> None:
    two = replace(ONE, tensor_parallel=2)
    given = flat({"bf16": SECONDS})
    for component in (Component.ATTN_OUT, Component.FFN_OUT):
        found = cost(linear(512, 4096, component), "bf16", workload=two, tables=given)
        assert found.per_token_s == pytest.approx(SECONDS + 9e-6)
        # 512 tokens of 512 values in 2 bytes: 64 pieces of the largest that was timed.
        assert found.first_token_s == pytest.approx(SECONDS + 64 * 9e-6)
    first = cost(linear(4096, 512), "bf16", workload=two, tables=given)
    assert first.per_token_s == pytest.approx(SECONDS)


def test_where_no_sum_was_measured_the_link_sets_its_time() -> None:
    two = replace(ONE, tensor_parallel=2)
    down = linear(512, 4096, Component.FFN_OUT)
    half = linear(512, 2048, Component.FFN_OUT)
    added = decode_s(down, "bf16", ROOF, two) - decode_s(half, "bf16", ROOF)
    assert added == pytest.approx(REDUCE_S + 512 * 2 / 4.5e11)
    with pytest.raises(HardwareError, match="roof has no link to 1 others"):
        decode_s(down, "bf16", replace(ROOF, link_bytes_s=None), two)


def test_bytes_are_of_all_gpus_together() -> None:
    two = replace(ONE, tensor_parallel=2)
    for shape in (linear(64, 64), attention(Component.KV_CACHE)):
        one, many = (cost(shape, "bf16", workload=w) for w in (ONE, two))
        assert (one.weight_bytes, one.kv_bytes) == (many.weight_bytes, many.kv_bytes)


# Bytes


def test_the_cache_is_as_wide_as_what_is_stored() -> None:
    busy = Workload(batch_size=3, prompt_tokens=100, output_tokens=20)
    cache = attention(Component.KV_CACHE)
    for name, width in (("fp32", 4), ("bf16", 2), ("fp8_e4m3", 1), ("fp8_e5m2", 1)):
        found = cost(cache, name, workload=busy)
        assert found.kv_bytes == 3 * 120 * 2 * 8 * 128 * width
        assert found.weight_bytes == 0
    windowed = cost(attention(Component.KV_CACHE, window=50), "bf16", workload=busy)
    assert windowed.kv_bytes == 3 * 50 * 2 * 8 * 128 * 2


def test_only_the_cache_site_holds_the_cache() -> None:
    # What QKᵀ and PV compute in says nothing about what is stored.
    for component in (Component.ATTN_SCORES, Component.ATTN_VALUES):
        for name in ("bf16", "fp8_e4m3"):
            assert cost(attention(component), name).kv_bytes == 0


def test_no_softmax_is_faster_than_another() -> None:
    site = attention(Component.ATTN_SOFTMAX)
    names = [c.name for c in CHOICES[Component.ATTN_SOFTMAX]]
    assert {decode_s(site, n) for n in names} == {0.0}
    assert {prefill_s(site, n) for n in names} == {0.0}


def test_one_site_costs_the_same_in_every_layer() -> None:
    site = linear(4096, 4096)
    other = replace(site, site=Site(7, Component.FFN_IN))
    assert cost(site, "bf16") == cost(other, "bf16")


def test_a_table_of_embeddings_is_gathered_from() -> None:
    table = SiteShape(
        Site(WHOLE_MODEL, Component.EMBEDDINGS), weight_elements=1600 * 512
    )
    assert decode_s(table, "bf16", ROOF) == pytest.approx(
        512 * 4 / ROOF.bandwidth_bytes_s
    )


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("fp32", 4 * 4096),
        ("bf16", 2 * 4096),
        ("fp8_e4m3", 4096 + 4),  # one scale
        ("fp8_e4m3_token", 4096 + 4 * 64),  # one for each of 64 outputs
        ("fp8_e4m3_weight_only", 4096 + 4 * 64),
        ("fp8_e4m3_block", 4096 + 4),  # all in one block
        ("fp6_e3m2_mx", 4096 * 6 // 8 + 64 * 2),  # a byte for 32 numbers
        ("fp4_e2m1_mx", 4096 // 2 + 64 * 2),
        ("fp4_e2m1_nv", 4096 // 2 + 64 * 4 + 4),  # a byte for 16, and the tensor's
        ("int8", 4096 + 4 * 64),
        ("int4_weight_only", 4096 // 2 + 4 * 64),  # a group is longer than the row
    ],
)
def test_weight_bytes_count_the_scales(name: str, held: int) -> None:
    found = cost(linear(64, 64), name, device("b200"))
    assert found.weight_bytes == held
    assert found.kv_bytes == 0


def test_every_choice_of_a_linear_site_has_a_time_on_a_b200() -> None:
    names: list[Choice] = list(CHOICES[Component.FFN_IN])
    for choice in names:
        assert cost(linear(4096, 4096), choice.name, device("b200")).per_token_s > 0
