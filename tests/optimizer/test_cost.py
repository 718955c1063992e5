import pytest

from optimizer.cost import (
    QUANTIZE_BYTES,
    Fit,
    fit,
    matmul_flops,
    quantize_s,
    roofline_s,
    site_cost,
)
from optimizer.errors import HardwareError
from optimizer.hardware import DEVICES, Device, device
from optimizer.spec import Workload
from optimizer.stack import (
    CHOICES,
    WHOLE_MODEL,
    Component,
    ModelShape,
    Precision,
    Site,
    SiteShape,
    choice_named,
)

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
)
ONE = Workload(batch_size=1, prompt_tokens=512, output_tokens=128)


def linear(n: int, k: int, component: Component = Component.FFN_IN) -> SiteShape:
    return SiteShape(Site(0, component), n=n, k=k, weight_elements=n * k)


def attention(component: Component, window: int | None = None) -> SiteShape:
    return SiteShape(
        Site(0, component), heads=8, kv_heads=2, head_dim=64, window=window
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


def decode_s(
    shape: SiteShape, name: str, where: Device = H100, workload: Workload = ONE
) -> float:
    choice = choice_named(shape.site.component, name)
    return site_cost(shape, choice, where, workload, MODEL).per_token_s


def prefill_s(
    shape: SiteShape, name: str, where: Device = H100, workload: Workload = ONE
) -> float:
    choice = choice_named(shape.site.component, name)
    return site_cost(shape, choice, where, workload, MODEL).first_token_s


# The primitives


def test_matmul_counts_multiplies_and_adds() -> None:
    assert matmul_flops(2, 3, 5) == 60


@pytest.mark.parametrize(
    ("flops", "bytes_moved", "peak", "seconds"),
    [
        (1000, 1, 100.0, 10.0),  # compute-bound
        (1000, 1, 200.0, 5.0),  # half the time in half the bits
        (1, 1000, 200.0, 100.0),  # memory-bound: the peak does not matter
    ],
)
def test_roofline(
    flops: float, bytes_moved: float, peak: float, seconds: float
) -> None:
    assert roofline_s(flops, bytes_moved, peak, 10.0) == seconds


def square_us(rows: int, fmt: str) -> float:
    """Return the bare roofline of rows × 4096 × 4096 on an H100, in µs."""
    width = 1 if fmt == "fp8" else 2
    moved = 4096 * 4096 * width + rows * 4096 * (width + 2)  # the output is bf16
    flops = matmul_flops(rows, 4096, 4096)
    peak, bandwidth = H100.peak_flops[fmt], H100.bandwidth_bytes_s
    return roofline_s(flops, moved, peak, bandwidth) * 1e6


@pytest.mark.parametrize(
    ("rows", "bf16_us", "fp8_us"),
    [(1, 10.021, 5.012), (16, 10.095, 5.067), (4096, 138.911, 69.452)],
)
def test_bare_roofline_of_a_square(rows: int, bf16_us: float, fp8_us: float) -> None:
    assert square_us(rows, "bf16") == pytest.approx(bf16_us, abs=5e-4)
    assert square_us(rows, "fp8") == pytest.approx(fp8_us, abs=5e-4)


@pytest.mark.parametrize(
    ("rows", "with_pass", "with_launches"),
    [
        (1, 1.998, 1.000),
        (64, 1.886, 0.990),
        (256, 1.636, 0.963),
        (512, 1.644, 1.088),
        (4096, 1.644, 1.523),
    ],
)
def test_what_the_quantization_pass_leaves_of_the_speedup(
    rows: int, with_pass: float, with_launches: float
) -> None:
    narrowed = QUANTIZE_BYTES * rows * 4096 / H100.bandwidth_bytes_s * 1e6
    bf16, fp8 = square_us(rows, "bf16"), square_us(rows, "fp8") + narrowed
    assert bf16 / fp8 == pytest.approx(with_pass, abs=5e-4)
    launch = 5.0  # µs, and FP8 has one more
    assert (bf16 + launch) / (fp8 + 2 * launch) == pytest.approx(
        with_launches, abs=5e-4
    )


# The fit

# Output × input features, µs of one token in bf16 and in FP8: vLLM 0.24, H100.
GEMMS_US = [
    (4096, 4096, 15.1, 13.8),
    (4608, 3584, 14.0, 13.2),  # Qwen2-7B's qkv, then its gate and up, then down
    (37888, 3584, 94.0, 51.0),
    (3584, 18944, 51.0, 33.0),
]


@pytest.mark.parametrize(("n", "k", "bf16_us", "fp8_us"), GEMMS_US)
def test_the_model_agrees_with_measured_gemms(
    n: int, k: int, bf16_us: float, fp8_us: float
) -> None:
    # Four parameters for eight numbers: the residuals are up to 6.5 %.
    assert decode_s(linear(n, k), "bf16") * 1e6 == pytest.approx(bf16_us, rel=0.07)
    assert decode_s(linear(n, k), "fp8_e4m3") * 1e6 == pytest.approx(fp8_us, rel=0.07)


def test_fp8_is_slower_than_bf16_on_a_b200_at_4096() -> None:
    b200 = device("b200")
    assert decode_s(linear(4096, 4096), "bf16", b200) * 1e6 == pytest.approx(
        9.7, rel=0.01
    )
    assert decode_s(linear(4096, 4096), "fp8_e4m3", b200) * 1e6 == pytest.approx(
        24.7, rel=0.01
    )


def test_efficiencies_go_with_the_device() -> None:
    assert fit(ROOF).bandwidth_share == fit(ROOF).compute_share == 1.0
    assert fit(device("b200")) != fit(H100) == fit(device("l4"))


@pytest.mark.parametrize("each", [*DEVICES.values(), ROOF], ids=[*DEVICES, "local"])
def test_no_efficiency_exceeds_the_data_sheet(each: Device) -> None:
    reached: Fit = fit(each)
    assert 0 < reached.bandwidth_share <= 1
    assert 0 < reached.compute_share <= 1
    assert reached.launch_s >= 0
    assert reached.quantize_s >= 0


# Sites


def test_a_decode_step_of_a_linear_site_by_hand() -> None:
    # 2 rows: weights 2·32·64, inputs 2·2·64, outputs 2·2·32 bytes; memory-bound.
    moved = 4096 + 256 + 128
    two = Workload(batch_size=2)
    assert decode_s(linear(32, 64), "bf16", ROOF, two) == pytest.approx(
        moved / ROOF.bandwidth_bytes_s + fit(ROOF).launch_s, rel=1e-12
    )


def test_a_prefill_of_a_linear_site_by_hand() -> None:
    # 2 · (4·1024 rows) · 4096² FLOP: compute-bound, so the peak alone decides.
    work = 2 * 4096 * 4096 * 4096
    four = Workload(batch_size=4, prompt_tokens=1024)
    assert prefill_s(linear(4096, 4096), "bf16", ROOF, four) == pytest.approx(
        work / ROOF.peak_flops["bf16"] + fit(ROOF).launch_s, rel=1e-12
    )


def test_fp8_input_pays_its_pass_and_weight_only_does_not() -> None:
    site = linear(4096, 4096)
    narrow, stored = (decode_s(site, n) for n in ("fp8_e4m3", "fp8_e4m3_weight_only"))
    narrowed = quantize_s(4096, Precision("fp8_e4m3"), H100)
    # The other differences: one more byte for each input, 4 for each channel's scale.
    bytes_s = (4096 * 1 + 4 * 4096 - 4) / (H100.bandwidth_bytes_s * 0.88)
    assert narrow - narrowed == pytest.approx(stored - bytes_s, rel=1e-9)
    assert quantize_s(4096, Precision("bf16"), H100) == 0.0


def test_weight_only_computes_at_the_16_bit_peak() -> None:
    long = Workload(batch_size=8, prompt_tokens=2048)
    site = linear(4096, 4096)
    stored, bf16 = (
        prefill_s(site, n, workload=long) for n in ("fp8_e4m3_weight_only", "bf16")
    )
    assert stored == bf16
    assert prefill_s(site, "fp8_e4m3", workload=long) < bf16


def test_weight_only_runs_where_fp8_does_not() -> None:
    a100 = device("a100")
    site = linear(4096, 4096)
    assert decode_s(site, "fp8_e4m3_weight_only", a100) < decode_s(site, "bf16", a100)
    with pytest.raises(HardwareError, match=r"A100 .* has no fp8 matmul: fp8_e4m3"):
        decode_s(site, "fp8_e4m3", a100)


def test_fp8_buys_nothing_in_a_tiny_layer() -> None:
    assert decode_s(linear(32, 32), "fp8_e4m3") >= decode_s(linear(32, 32), "bf16")


def test_lm_head_sees_the_last_position_only() -> None:
    head = linear(1600, 512, Component.LM_HEAD)
    assert prefill_s(head, "bf16") == decode_s(head, "bf16")
    assert prefill_s(linear(1600, 512), "bf16") > decode_s(linear(1600, 512), "bf16")


def test_decode_reads_the_cache_at_the_mean_context() -> None:
    # Mean context 512 + 128 / 2 = 576 tokens of K and V, 2 heads of 64 in 2 bytes,
    # and the token that is written.
    moved = (576 + 1) * 2 * 2 * 64 * 2
    cache = attention(Component.KV_CACHE)
    assert decode_s(cache, "bf16", ROOF) == pytest.approx(
        moved / ROOF.bandwidth_bytes_s
    )
    # The products, 576 · 8 heads · 64, take longer than Q or the output to move. One
    # kernel, launched once.
    launch = fit(ROOF).launch_s
    expected = 2 * 576 * 8 * 64 / ROOF.peak_flops["bf16"]
    assert expected > 8 * 64 * 2 / ROOF.bandwidth_bytes_s
    scores, values = (
        attention(c) for c in (Component.ATTN_SCORES, Component.ATTN_VALUES)
    )
    assert decode_s(scores, "bf16", ROOF) == pytest.approx(expected + launch)
    assert decode_s(values, "bf16", ROOF) == pytest.approx(expected)


def test_prefill_writes_the_cache_and_reads_it_behind_the_products() -> None:
    moved = 512 * 2 * 2 * 64 * 2
    assert prefill_s(attention(Component.KV_CACHE), "bf16", ROOF) == pytest.approx(
        moved / ROOF.bandwidth_bytes_s
    )


def test_prefill_counts_the_causal_triangle() -> None:
    # 4096·4097 / 2 pairs; each costs 2 · 8 heads · 64 FLOP.
    long = Workload(prompt_tokens=4096)
    work = 2 * 8 * 64 * 4096 * 4097 / 2
    assert prefill_s(
        attention(Component.ATTN_VALUES), "bf16", ROOF, long
    ) == pytest.approx(work / ROOF.peak_flops["bf16"])


def test_a_window_cuts_the_triangle_and_the_cache() -> None:
    long = Workload(prompt_tokens=4096, output_tokens=0)
    sliding = attention(Component.ATTN_VALUES, window=1024)
    # A triangle of 1024, then 3072 rows of 1024 pairs.
    pairs = 1024 * 1025 / 2 + 3072 * 1024
    assert prefill_s(sliding, "bf16", ROOF, long) == pytest.approx(
        2 * 8 * 64 * pairs / ROOF.peak_flops["bf16"]
    )
    cache = attention(Component.KV_CACHE, window=1024)
    bf16 = choice_named(Component.KV_CACHE, "bf16")
    held = site_cost(cache, bf16, H100, long, MODEL).kv_bytes
    assert held == 1024 * 2 * 2 * 64 * 2
    moved = (1024 + 1) * 2 * 2 * 64 * 2
    assert decode_s(cache, "bf16", ROOF, long) == pytest.approx(
        moved / ROOF.bandwidth_bytes_s
    )


ATTENTION = (Component.KV_CACHE, Component.ATTN_SCORES, Component.ATTN_VALUES)


def test_a_long_window_changes_nothing() -> None:
    for component in ATTENTION:
        wide, open_ = attention(component, window=10_000), attention(component)
        assert decode_s(wide, "bf16") == decode_s(open_, "bf16")
        assert prefill_s(wide, "bf16") == prefill_s(open_, "bf16")


def test_the_cache_is_as_wide_as_what_is_stored() -> None:
    busy = Workload(batch_size=3, prompt_tokens=100, output_tokens=20)
    cache = attention(Component.KV_CACHE)
    for name, width in (("fp32", 4), ("bf16", 2), ("fp8_e4m3", 1), ("fp8_e5m2", 1)):
        choice = choice_named(Component.KV_CACHE, name)
        cost = site_cost(cache, choice, H100, busy, MODEL)
        assert cost.kv_bytes == 3 * 120 * 2 * 2 * 64 * width
        assert cost.weight_bytes == 0


def test_only_the_cache_site_holds_the_cache() -> None:
    # What QKᵀ and PV compute in says nothing about what is stored.
    for component in (Component.ATTN_SCORES, Component.ATTN_VALUES):
        for name in ("bf16", "fp8_e4m3"):
            choice = choice_named(component, name)
            assert (
                site_cost(attention(component), choice, H100, ONE, MODEL).kv_bytes == 0
            )


def test_an_fp8_cache_is_read_in_half_the_time() -> None:
    cache = attention(Component.KV_CACHE)
    for workload in (ONE, Workload(batch_size=64, prompt_tokens=8192)):
        wide, half = (decode_s(cache, n, ROOF, workload) for n in ("bf16", "fp8_e4m3"))
        assert half == pytest.approx(wide / 2)
        assert decode_s(cache, "fp8_e4m3_head", ROOF, workload) == half


def test_fp8_attention_pays_off_only_in_a_long_prompt() -> None:
    scores = attention(Component.ATTN_SCORES)
    long = Workload(prompt_tokens=32_768)
    assert decode_s(scores, "fp8_e4m3") > decode_s(scores, "bf16")
    assert prefill_s(scores, "fp8_e4m3") > prefill_s(scores, "bf16")
    assert prefill_s(scores, "fp8_e4m3", H100, long) < prefill_s(
        scores, "bf16", H100, long
    )


def test_no_softmax_is_faster_than_another() -> None:
    site = attention(Component.ATTN_SOFTMAX)
    names = [c.name for c in CHOICES[Component.ATTN_SOFTMAX]]
    assert {decode_s(site, n) for n in names} == {0.0}
    assert {prefill_s(site, n) for n in names} == {0.0}


def test_an_activation_moves_its_elements_in_and_out() -> None:
    site = SiteShape(Site(0, Component.FFN_ACT), elements=1024)
    launch = fit(ROOF).launch_s
    assert decode_s(site, "bf16", ROOF) == pytest.approx(
        1024 * 4 / ROOF.bandwidth_bytes_s + launch
    )
    assert decode_s(site, "fp8_e4m3", ROOF) > decode_s(site, "bf16", ROOF)


def test_the_two_norms_of_a_layer_are_two_kernels() -> None:
    both, one = (
        SiteShape(Site(0, Component.NORMS), elements=e, weight_elements=e)
        for e in (1024, 512)
    )
    assert decode_s(both, "bf16") == pytest.approx(2 * decode_s(one, "bf16"))


def test_embeddings_gather_one_row_for_each_token() -> None:
    table = SiteShape(
        Site(WHOLE_MODEL, Component.EMBEDDINGS), weight_elements=1600 * 512
    )
    assert decode_s(table, "bf16", ROOF) == pytest.approx(
        512 * 4 / ROOF.bandwidth_bytes_s + fit(ROOF).launch_s
    )


@pytest.mark.parametrize(
    ("name", "stored"),
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
def test_weight_bytes_count_the_scales(name: str, stored: int) -> None:
    choice = choice_named(Component.FFN_IN, name)
    cost = site_cost(linear(64, 64), choice, device("b200"), ONE, MODEL)
    assert cost.weight_bytes == stored
    assert cost.kv_bytes == 0
