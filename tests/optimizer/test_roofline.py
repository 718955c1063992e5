"""The roofline by hand, on both sides of the roof and with what kernels add to it."""

import pytest

from optimizer.errors import HardwareError
from optimizer.fits import IDEAL, Fit, Kernel
from optimizer.hardware import DEVICES, Device, device
from optimizer.roofline import (
    QUANTIZE_BYTES,
    ROTATE_AND_WRITE,
    Frame,
    Step,
    frame,
    gemm_format,
    launches,
    least_s,
    matmul_flops,
    quantize_s,
    roofline_s,
    seconds,
    written_s,
)
from optimizer.stack import (
    CHOICES,
    WHOLE_MODEL,
    Component,
    Granularity,
    ModelShape,
    Precision,
    Site,
    SiteShape,
    choice_named,
)

H100 = device("h100")
WITHIN = Frame(hidden=512)
BANDWIDTH = H100.bandwidth_bytes_s


def linear(n: int, k: int, component: Component = Component.FFN_IN) -> SiteShape:
    return SiteShape(Site(0, component), n=n, k=k, weight_elements=n * k)


def attention(component: Component, window: int | None = None) -> SiteShape:
    return SiteShape(
        Site(0, component), heads=8, kv_heads=2, head_dim=64, window=window
    )


def decode(batch: int = 1, context: float = 576) -> Step:
    return Step(batch, 1, context)


def prefill(batch: int = 1, prompt: int = 512) -> Step:
    return Step(batch, prompt, prompt)


def bare_s(
    shape: SiteShape, name: str, step: Step, within: Frame = WITHIN, fit: Fit = IDEAL
) -> float:
    choice = choice_named(shape.site.component, name)
    return seconds(shape, choice, H100, step, within, fit)


FREE = Kernel(0.0)


def reached(
    gemm: Kernel = FREE, stream: Kernel = FREE, generation: Kernel = FREE
) -> Fit:
    """Kernels that reach the data sheet, but for those that are given."""
    return Fit({"bf16": gemm}, stream, FREE, FREE, generation)


# The primitives


def test_matmul_counts_multiplies_and_adds() -> None:
    assert matmul_flops(2, 3, 5) == 60


@pytest.mark.parametrize(
    ("flops", "bytes_moved", "peak", "expected"),
    [
        (1000, 1, 100.0, 10.0),  # compute-bound
        (1000, 1, 200.0, 5.0),  # half the time in half the bits
        (1, 1000, 200.0, 100.0),  # memory-bound: the peak does not matter
    ],
)
def test_roofline(
    flops: float, bytes_moved: float, peak: float, expected: float
) -> None:
    assert roofline_s(flops, bytes_moved, peak, 10.0) == expected


# FP8 that is not faster: an H100's 989.4 and 1978.9 TFLOP/s and 3350 GB/s on a square of
# 4096, as the reports of small batches have it (llm-compressor#852, pytorch/ao#1297).

SQUARE = linear(4096, 4096)
FP8 = choice_named(Component.FFN_IN, "fp8_e4m3")


def square_us(rows: int, name: str, fit: Fit = IDEAL) -> float:
    return bare_s(SQUARE, name, decode(rows), fit=fit) * 1e6


def pass_us(rows: int) -> float:
    return quantize_s(rows * 4096, FP8.input, H100, IDEAL) * 1e6


@pytest.mark.parametrize(
    ("rows", "bf16_us", "fp8_us", "ratio"),
    [
        (1, 10.021, 5.012, 2.000),
        (16, 10.095, 5.067, 1.992),
        (4096, 138.911, 69.452, 2.000),
    ],
)
def test_the_bare_roofline_of_a_square(
    rows: int, bf16_us: float, fp8_us: float, ratio: float
) -> None:
    assert H100.peak_flops["bf16"] == 989.4e12
    assert H100.peak_flops["fp8"] == 1978.9e12
    assert BANDWIDTH == 3350e9
    bf16, fp8 = square_us(rows, "bf16"), square_us(rows, "fp8_e4m3") - pass_us(rows)
    assert bf16 == pytest.approx(bf16_us, abs=5e-4)
    assert fp8 == pytest.approx(fp8_us, abs=5e-4)
    assert bf16 / fp8 == pytest.approx(ratio, abs=5e-4)


@pytest.mark.parametrize(
    ("rows", "ratio"), [(1, 1.998), (64, 1.886), (256, 1.636), (512, 1.644)]
)
def test_what_the_pass_to_fp8_leaves_of_the_speedup(rows: int, ratio: float) -> None:
    found = square_us(rows, "bf16") / square_us(rows, "fp8_e4m3")
    assert found == pytest.approx(ratio, abs=5e-4)


@pytest.mark.parametrize(
    ("rows", "ratio"),
    [(1, 1.000), (64, 0.990), (256, 0.963), (512, 1.088), (4096, 1.523)],
)
def test_what_one_more_launch_of_5_us_leaves_of_it(rows: int, ratio: float) -> None:
    launch = Kernel(5e-6)
    slow = Fit({"bf16": launch}, launch, launch, launch, launch)
    found = square_us(rows, "bf16", slow) / square_us(rows, "fp8_e4m3", slow)
    assert found == pytest.approx(ratio, abs=5e-4)


def test_a_tiny_layer_gains_nothing_from_fp8() -> None:
    launch = Kernel(5e-6)
    slow = Fit({"bf16": launch}, launch, launch, launch, launch)
    for fit in (slow, IDEAL):
        wide, half = (
            bare_s(linear(32, 32), name, decode(), fit=fit)
            for name in ("bf16", "fp8_e4m3")
        )
        # 2176 bytes against 1188 and a pass of 96; a launch decides for real.
        assert (half >= wide) == (fit is slow)


def test_a_memory_bound_layer_gains_nothing_where_weights_stay_16_bits() -> None:
    # Products at twice the rate, the same bytes of weights: only the inputs shrink.
    wide = 2 * 4096 * 4096 / BANDWIDTH
    assert square_us(1, "bf16") / (wide * 1e6) < 1.001


# Sites


def test_a_decode_step_of_a_linear_site_by_hand() -> None:
    # 2 rows: weights 2·32·64, inputs 2·2·64, outputs 2·2·32 bytes; memory-bound.
    moved = 4096 + 256 + 128
    assert bare_s(linear(32, 64), "bf16", decode(2)) == pytest.approx(moved / BANDWIDTH)


def test_a_prefill_of_a_linear_site_by_hand() -> None:
    # 2 · (4·1024 rows) · 4096² FLOP: compute-bound, so the peak alone decides.
    work = 2 * 4096 * 4096 * 4096
    assert bare_s(SQUARE, "bf16", prefill(4, 1024)) == pytest.approx(
        work / H100.peak_flops["bf16"]
    )


def test_a_kernel_reaches_its_shares_after_its_fixed_time() -> None:
    half = reached(gemm=Kernel(1e-5, 0.5, 0.25))
    moved = 4096 + 128 + 64
    assert bare_s(linear(32, 64), "bf16", decode(), fit=half) == pytest.approx(
        1e-5 + moved / (0.5 * BANDWIDTH)
    )
    work = 2 * 4096 * 4096 * 4096
    assert bare_s(SQUARE, "bf16", prefill(4, 1024), fit=half) == pytest.approx(
        1e-5 + work / (0.25 * H100.peak_flops["bf16"])
    )


def test_fp8_input_pays_its_pass_and_weight_only_does_not() -> None:
    narrow, held = (
        bare_s(SQUARE, name, decode()) for name in ("fp8_e4m3", "fp8_e4m3_weight_only")
    )
    # The other differences: one more byte for each input, 4 for each channel's scale.
    bytes_s = (4096 * 1 + 4 * 4096 - 4) / BANDWIDTH
    passed = QUANTIZE_BYTES * 4096 / BANDWIDTH
    assert narrow - passed == pytest.approx(held - bytes_s, rel=1e-9)
    assert quantize_s(4096, Precision("bf16"), H100, IDEAL) == 0.0


def test_a_scale_that_is_sought_takes_another_pass_than_one_that_is_known() -> None:
    sought = Fit({}, Kernel(1e-6), Kernel(3e-6), Kernel(0.0), Kernel(0.0))
    bytes_s = QUANTIZE_BYTES * 4096 / BANDWIDTH
    for granularity, fixed in (
        (Granularity.TENSOR, 1e-6),
        (Granularity.HEAD, 1e-6),
        (Granularity.TOKEN, 3e-6),
        (Granularity.GROUP, 3e-6),
    ):
        found = quantize_s(4096, Precision("fp8_e4m3", granularity), H100, sought)
        assert found == pytest.approx(fixed + bytes_s)


def test_weight_only_computes_at_the_16_bit_peak() -> None:
    long = prefill(8, 2048)
    held, bf16, fp8 = (
        bare_s(SQUARE, n, long) for n in ("fp8_e4m3_weight_only", "bf16", "fp8_e4m3")
    )
    assert held == bf16
    assert fp8 < bf16


def test_a_device_without_the_unit_is_named() -> None:
    a100 = device("a100")
    with pytest.raises(HardwareError, match=r"A100 .* has no fp8 matmul: fp8_e4m3"):
        seconds(SQUARE, FP8, a100, decode(), WITHIN, IDEAL)


@pytest.mark.parametrize(
    ("name", "fmt"),
    [
        ("bf16", "bf16"),
        ("fp32", "fp32"),
        ("fp8_e4m3", "fp8"),
        ("fp8_e4m3_token", "fp8"),
        ("fp8_e5m2", "fp8"),
        ("fp8_e4m3_block", "fp8_block"),
        ("fp8_e4m3_weight_only", "bf16"),  # it multiplies what it widened
        ("fp4_e2m1_nv", "nvfp4"),
        ("fp4_e2m1_mx", "fp4_e2m1"),
        ("int8", "int8"),
    ],
)
def test_the_kernel_follows_from_the_input(name: str, fmt: str) -> None:
    assert gemm_format(choice_named(Component.FFN_IN, name)) == fmt


def test_lm_head_sees_the_last_position_only() -> None:
    head = linear(1600, 512, Component.LM_HEAD)
    assert bare_s(head, "bf16", prefill()) == bare_s(head, "bf16", decode())
    other = linear(1600, 512)
    assert bare_s(other, "bf16", prefill()) > bare_s(other, "bf16", decode())


# Attention

READ = 576 * 2 * 2 * 64 * 2  # tokens of K and V, 2 heads of 64 in 2 bytes
WRITTEN = 2 * 2 * 64 * 2  # of one token
BESIDE = 4 * (8 + 2) * 64 + 4 * 2 * 64  # q and k rotated; K and V read to be written


def test_decode_reads_the_cache_and_writes_one_token() -> None:
    cache = attention(Component.KV_CACHE)
    assert bare_s(cache, "bf16", decode()) == pytest.approx(
        (READ + WRITTEN + BESIDE) / BANDWIDTH
    )
    choice = choice_named(Component.KV_CACHE, "bf16")
    assert written_s(cache, choice, H100, decode(), WITHIN, IDEAL) == pytest.approx(
        (WRITTEN + BESIDE) / BANDWIDTH
    )


def test_products_of_a_decode_step_go_by_the_context() -> None:
    # 576 · 8 heads · 64 take longer than Q or the output to move. One fixed time.
    expected = 2 * 576 * 8 * 64 / H100.peak_flops["bf16"]
    assert expected > 8 * 64 * 2 / BANDWIDTH
    timed = reached(generation=Kernel(7e-6))
    scores, values = (
        bare_s(attention(c), "bf16", decode(), fit=timed)
        for c in (Component.ATTN_SCORES, Component.ATTN_VALUES)
    )
    assert scores == pytest.approx(expected + 7e-6)
    assert values == pytest.approx(expected)


def test_prefill_writes_the_cache_and_reads_it_behind_the_products() -> None:
    cache = attention(Component.KV_CACHE)
    assert bare_s(cache, "bf16", prefill()) == pytest.approx(
        512 * (WRITTEN + BESIDE) / BANDWIDTH
    )


def test_prefill_counts_the_causal_triangle() -> None:
    # 4096·4097 / 2 pairs; each costs 2 · 8 heads · 64 FLOP.
    work = 2 * 8 * 64 * 4096 * 4097 / 2
    values = attention(Component.ATTN_VALUES)
    assert bare_s(values, "bf16", prefill(1, 4096)) == pytest.approx(
        work / H100.peak_flops["bf16"]
    )


def test_a_window_cuts_the_triangle_and_the_cache() -> None:
    sliding = attention(Component.ATTN_VALUES, window=1024)
    # A triangle of 1024, then 3072 rows of 1024 pairs.
    pairs = 1024 * 1025 / 2 + 3072 * 1024
    assert bare_s(sliding, "bf16", prefill(1, 4096)) == pytest.approx(
        2 * 8 * 64 * pairs / H100.peak_flops["bf16"]
    )
    cache = attention(Component.KV_CACHE, window=1024)
    held = 1024 * 2 * 2 * 64 * 2
    assert bare_s(cache, "bf16", decode(1, 4096)) == pytest.approx(
        (held + WRITTEN + BESIDE) / BANDWIDTH
    )


ATTENTION = (Component.KV_CACHE, Component.ATTN_SCORES, Component.ATTN_VALUES)


def test_a_long_window_changes_nothing() -> None:
    for component in ATTENTION:
        wide, open_ = attention(component, window=10_000), attention(component)
        for step in (decode(), prefill()):
            assert bare_s(wide, "bf16", step) == bare_s(open_, "bf16", step)


def test_an_fp8_cache_is_read_in_half_the_time() -> None:
    cache = attention(Component.KV_CACHE)
    for step in (decode(), decode(64, 8192)):
        wide, half, head = (
            bare_s(cache, n, step) for n in ("bf16", "fp8_e4m3", "fp8_e4m3_head")
        )
        beside = step.tokens * BESIDE / BANDWIDTH
        assert half - beside == pytest.approx((wide - beside) / 2)
        assert head == half


def test_fp8_attention_pays_off_only_in_a_long_prompt() -> None:
    scores = attention(Component.ATTN_SCORES)
    real = Fit({}, Kernel(2e-6), Kernel(3e-6), Kernel(1e-5), Kernel(1e-5))

    def each(step: Step) -> list[float]:
        return [bare_s(scores, n, step, fit=real) for n in ("bf16", "fp8_e4m3")]

    for step in (decode(), prefill()):
        wide, half = each(step)
        assert half > wide
    wide, half = each(prefill(1, 32_768))
    assert half < wide


def test_no_softmax_is_faster_than_another() -> None:
    site = attention(Component.ATTN_SOFTMAX)
    for choice in CHOICES[Component.ATTN_SOFTMAX]:
        assert bare_s(site, choice.name, decode()) == 0.0
        assert bare_s(site, choice.name, prefill()) == 0.0


# Elementwise

STREAM = reached(stream=Kernel(2e-6))


def test_an_activation_moves_its_elements_in_and_out() -> None:
    site = SiteShape(Site(0, Component.FFN_ACT), elements=1024)
    for gated, moved in ((False, 4), (True, 6)):  # a gated one reads two halves
        found = bare_s(site, "bf16", decode(), Frame(512, gated), STREAM)
        assert found == pytest.approx(1024 * moved / BANDWIDTH + 2e-6)
    assert bare_s(site, "fp8_e4m3", decode(), fit=STREAM) > 4e-6  # a pass beside it


def test_each_norm_adds_to_the_residual_stream_in_a_kernel_of_its_own() -> None:
    for elements, norms in ((1024, 2), (512, 1), (0, 1)):
        site = SiteShape(Site(0, Component.NORMS), elements=elements)
        # Input and residual in, sum and normal form out: 4 · 2 bytes each.
        assert bare_s(site, "bf16", decode(), fit=STREAM) == pytest.approx(
            norms * 2e-6 + 8 * elements / BANDWIDTH
        )


def test_embeddings_gather_one_row_for_each_token() -> None:
    table = SiteShape(
        Site(WHOLE_MODEL, Component.EMBEDDINGS), weight_elements=1600 * 512
    )
    assert bare_s(table, "bf16", decode(3), fit=STREAM) == pytest.approx(
        3 * 512 * 4 / BANDWIDTH + 2e-6
    )


# A model around them


def test_the_feed_forward_network_says_whether_it_is_gated() -> None:
    def model(*sites: SiteShape) -> ModelShape:
        return ModelShape("Toy", 1, 512, 1600, 8192, 0, 0, False, sites)

    down = linear(512, 1024, Component.FFN_OUT)
    assert frame(model(linear(2048, 512), down)) == Frame(512, True)
    assert frame(model(linear(1024, 512), down)) == Frame(512, False)
    assert frame(model()) == Frame(512, False)


@pytest.mark.parametrize(
    ("component", "name", "count"),
    [
        (Component.FFN_IN, "bf16", 1),
        (Component.FFN_IN, "fp8_e4m3", 2),  # and the pass
        (Component.FFN_IN, "fp8_e4m3_weight_only", 1),
        (Component.KV_CACHE, "bf16", ROTATE_AND_WRITE),
        (Component.ATTN_SCORES, "bf16", 1),
        (Component.ATTN_SOFTMAX, "bf16", 0),
        (Component.ATTN_VALUES, "bf16", 0),
        (Component.FFN_ACT, "bf16", 1),
        (Component.EMBEDDINGS, "bf16", 1),
    ],
)
def test_a_site_is_so_many_kernels(component: Component, name: str, count: int) -> None:
    shape = SiteShape(Site(0, component), elements=1024)
    assert launches(shape, choice_named(component, name), 512) == count


def test_two_norms_are_two_kernels() -> None:
    both = SiteShape(Site(0, Component.NORMS), elements=1024)
    assert launches(both, choice_named(Component.NORMS, "bf16"), 512) == 2


# The physical limit


def test_the_least_time_counts_weights_or_products() -> None:
    bf16 = choice_named(Component.FFN_IN, "bf16")
    weights = 2 * 4096 * 4096 / BANDWIDTH
    assert least_s(SQUARE, bf16, H100, decode()) == pytest.approx(weights)
    products = 2 * 4096 * 4096 * 4096 / H100.peak_flops["bf16"]
    assert least_s(SQUARE, bf16, H100, prefill(4, 1024)) == pytest.approx(products)


@pytest.mark.parametrize("where", DEVICES.values(), ids=DEVICES)
def test_the_ideal_is_no_faster_than_the_least(where: Device) -> None:
    fmt = where.base16
    assert fmt is not None
    for shape in (SQUARE, *(attention(c) for c in ATTENTION)):
        choice = choice_named(shape.site.component, fmt)
        for step in (decode(), decode(64, 4000), prefill()):
            least = least_s(shape, choice, where, step)
            assert 0 < least <= seconds(shape, choice, where, step, WITHIN, IDEAL)


def test_what_can_be_part_of_another_kernel_has_no_least_time() -> None:
    for component in (Component.NORMS, Component.FFN_ACT, Component.ATTN_SOFTMAX):
        shape = SiteShape(Site(0, component), elements=512)
        choice = choice_named(component, "bf16")
        assert least_s(shape, choice, H100, decode()) == 0.0
