from itertools import product

import numpy as np
import pytest

from optimizer.catalogue import FP8_RATIO
from optimizer.errors import HardwareError
from optimizer.export_scheme import MATRICES
from optimizer.hardware import DEVICES, Device, closest, device, utilization
from optimizer.kernels import tables
from optimizer.rules import refusals
from optimizer.spec import ENGINES, SWEPT_FORMATS
from optimizer.stack import (
    CHOICES,
    LINEAR,
    WHOLE_MODEL,
    Component,
    Site,
    SiteShape,
    choice_named,
)

ALL = (*SWEPT_FORMATS, "fp16")
CPU = Device(
    id="local",
    name="this machine",
    peak_flops={"fp32": 1e11, "bf16": 1e11},
    bandwidth_bytes_s=1e10,
    memory_bytes=8 * 10**9,
    native=frozenset({"fp32", "bf16"}),
)


def shape(component: Component, n: int = 4096, k: int = 4096) -> SiteShape:
    return SiteShape(
        Site(0, component), n=n, k=k, weight_elements=n * k, heads=32, head_dim=128
    )


def refused(
    where: Device | str,
    component: Component,
    name: str,
    *,
    engine: str = "any",
    formats: tuple[str, ...] = ALL,
    n: int = 4096,
    k: int = 4096,
) -> str | None:
    found = device(where) if isinstance(where, str) else where
    answers = refusals(found, engine, shape(component, n, k), formats)
    return answers[choice_named(component, name)]


@pytest.mark.parametrize(
    ("name", "bf16", "fp8", "bandwidth"),
    [
        # Dense figures: the headlines 1979 / 3958 (H100) and 242 / 485 (L4) are sparse.
        ("h100", 989.4e12, 1978.9e12, 3350e9),
        ("l4", 121.0e12, 242.5e12, 300e9),
    ],
)
def test_peaks_are_dense(name: str, bf16: float, fp8: float, bandwidth: float) -> None:
    found = device(name)
    assert found.peak_flops["bf16"] == pytest.approx(bf16)
    assert found.peak_flops["fp8"] == pytest.approx(fp8)
    assert found.bandwidth_bytes_s == bandwidth


def test_ridge_of_an_h100() -> None:
    h100 = device("h100")
    assert h100.peak_flops["bf16"] / h100.bandwidth_bytes_s == pytest.approx(
        295.3, abs=0.05
    )
    assert h100.peak_flops["fp8"] / h100.bandwidth_bytes_s == pytest.approx(
        590.7, abs=0.05
    )


@pytest.mark.parametrize("found", DEVICES.values(), ids=DEVICES)
def test_every_device_can_be_costed(found: Device) -> None:
    assert found.bandwidth_bytes_s > 0
    assert found.memory_bytes > 0
    assert found.sources
    assert found.base16
    for fmt in found.native:
        assert found.peak_flops["fp8" if fmt.startswith("fp8") else fmt] > 0
    if found.fp8:
        ratio = found.peak_flops["fp8"] / found.peak_flops["bf16"]
        assert FP8_RATIO[0] <= ratio <= FP8_RATIO[1]


@pytest.mark.parametrize("found", DEVICES.values(), ids=DEVICES)
def test_no_peak_is_beyond_units_times_clock(found: Device) -> None:
    units = found.units
    if units is None:
        pytest.skip("no source states its clock")
    for fmt in units.flop_per_clock.keys() & found.peak_flops.keys():
        limit = units.count * units.clock_hz * units.flop_per_clock[fmt]
        # Lower bounds hold too: a rate of half would be another card's, or a typo's.
        assert 0.9 * limit < found.peak_flops[fmt] < 1.01 * limit, fmt


def test_which_devices_have_no_source_for_their_clock() -> None:
    unheld = {d.id for d in DEVICES.values() if d.units is None}
    assert unheld == {"h20", "b300", "gb300", "gaudi2", "gaudi3"}


def test_utilization_is_a_share_of_the_dense_peak() -> None:
    # 2 · 4096³ = 137.4 GFLOP in 200 µs are 687 of 989.4 TFLOP/s.
    share = utilization(device("h100"), "bf16", 2 * 4096**3, 200e-6)
    assert share == pytest.approx(0.6946, abs=1e-4)
    both = [utilization(device("h100"), f, 1e15, 1.0) for f in ("fp8_e4m3", "fp8")]
    assert both[0] == both[1] == pytest.approx(0.5053, abs=1e-4)


def test_more_than_the_peak_is_a_wrong_catalogue_and_is_not_clipped() -> None:
    # 137.4 GFLOP in 100 µs would be 1374 TFLOP/s.
    with pytest.raises(HardwareError, match=r"wrong: 1374\.4 TFLOP/s of bf16 .* 139%"):
        utilization(device("h100"), "bf16", 2 * 4096**3, 100e-6)


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("h100", "NVIDIA H100 SXM5"),
        ("H100_SXM", "NVIDIA H100 SXM5"),
        ("h100-pcie", "NVIDIA H100 PCIe"),
        ("a100", "NVIDIA A100 SXM4 80GB"),
        ("A100 40GB", "NVIDIA A100 SXM4 40GB"),
        ("v100-32gb", "NVIDIA V100 SXM2 32GB"),
    ],
)
def test_aliases(name: str, full: str) -> None:
    assert device(name).name == full


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("h101", ["h100"]),
        ("H100 SXM6", ["h100", "h200", "a100"]),
        ("rtx5091", ["rtx-5090", "rtx-4090"]),
        ("loca", ["local"]),
        ("a-tpu", []),
    ],
)
def test_a_misspelled_device_is_answered_with_the_closest(
    name: str, meant: list[str]
) -> None:
    assert closest(name) == meant


def test_an_unknown_device_is_answered_with_the_known_ones() -> None:
    said = r"'h101'; did you mean h100\? known: p100, v100, .*gaudi3"
    with pytest.raises(HardwareError, match=said):
        device("h101")
    with pytest.raises(HardwareError, match=r"'a-tpu'; known: p100"):
        device("a-tpu")


def test_an_unknown_engine_is_answered_with_the_known_ones() -> None:
    with pytest.raises(HardwareError, match="unknown engine 'tgi'"):
        refusals(CPU, "tgi", shape(Component.FFN_IN), ALL)


@pytest.mark.parametrize(
    ("capability", "able"),
    [
        ("7.0", False),
        ("7.5", False),
        ("8.0", False),
        ("8.6", False),
        ("8.9", True),
        ("9.0", True),
        ("10.0", True),
        ("12.0", True),
    ],
)
def test_fp8_matmul_by_compute_capability(capability: str, able: bool) -> None:
    found = [d for d in DEVICES.values() if d.compute_capability == capability]
    assert found
    for each in found:
        reason = refused(each, Component.FFN_IN, "fp8_e4m3")
        assert (reason is None) == able
        assert able or "no FP8 matmul" in str(reason)


@pytest.mark.parametrize("name", ["a100", "a10"])
def test_ampere_stores_fp8_and_computes_in_bf16(name: str) -> None:
    assert refused(name, Component.FFN_IN, "fp8_e4m3_weight_only") is None
    assert refused(name, Component.EMBEDDINGS, "fp8_e4m3") is None
    assert refused(name, Component.FFN_ACT, "fp8_e4m3")
    assert refused(name, Component.ATTN_SCORES, "fp8_e4m3")


@pytest.mark.parametrize("name", ["p100", "v100", "t4"])
@pytest.mark.parametrize("component", Component)
def test_before_ampere_there_is_fp32_and_fp16(name: str, component: Component) -> None:
    answers = refusals(device(name), "any", shape(component), SWEPT_FORMATS)
    assert {c.name for c, no in answers.items() if no is None} == {"fp32", "fp16"}
    assert "no bf16" in str(refused(name, component, "bf16"))


@pytest.mark.parametrize("component", Component)
def test_fp16_stays_out_where_bf16_is_native(component: Component) -> None:
    assert "only where bf16 is missing" in str(refused("h100", component, "fp16"))


def test_amd_takes_fp8_in_its_own_encodings() -> None:
    assert device("mi300x").fp8 == ("fp8_e4m3fnuz", "fp8_e5m2fnuz")
    assert device("h100").fp8 == ("fp8_e4m3", "fp8_e5m2")
    assert device("a100").fp8 == ()
    assert refused("mi300x", Component.FFN_IN, "fp8_e5m2") is None


def test_gaudi_2_has_neither_ocp_e4m3_nor_a_known_fp32_rate() -> None:
    assert "no fp8_e4m3 with the range" in str(
        refused("gaudi2", Component.FFN_IN, "fp8_e5m2")
    )
    assert "reads FP8 weights" in str(
        refused("gaudi2", Component.FFN_IN, "fp8_e4m3_weight_only")
    )
    assert "no fp32 matmul rate" in str(refused("gaudi2", Component.FFN_IN, "fp32"))
    assert refused("gaudi2", Component.NORMS, "fp32") is None
    assert refused("gaudi3", Component.FFN_IN, "fp8_e4m3") is None


# Case C9
@pytest.mark.parametrize("size", [8, 15, 24, 32001, 50257])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e4m3_token", "fp8_e5m2"])
def test_k_and_n_come_in_sixteens(size: int, name: str) -> None:
    by_n = refused("h100", Component.LM_HEAD, name, n=size)
    by_k = refused("h100", Component.LM_HEAD, name, k=size)
    assert by_n == f"N = {size} is not a multiple of 16"
    assert by_k == f"K = {size} is not a multiple of 16"
    assert refused("h100", Component.LM_HEAD, "fp8_e4m3_weight_only", n=size) is None
    assert refused("h100", Component.LM_HEAD, "bf16", n=size) is None


@pytest.mark.parametrize("size", [16, 32000, 128256, 151936])
def test_common_vocabularies_are_eligible(size: int) -> None:
    assert refused("h100", Component.LM_HEAD, "fp8_e4m3", n=size) is None


def test_an_odd_head_keeps_attention_out_of_fp8() -> None:
    site = SiteShape(Site(0, Component.ATTN_VALUES), heads=8, head_dim=72)
    answers = refusals(device("h100"), "any", site, ALL)
    reason = answers[choice_named(Component.ATTN_VALUES, "fp8_e4m3")]
    assert reason == "head_dim = 72 is not a multiple of 16"


@pytest.mark.parametrize(
    ("name", "able"),
    [("h100", True), ("b200", True), ("l4", False), ("rtx-5090", False)],
)
def test_fp8_attention_is_for_hopper_and_data_center_blackwell(
    name: str, able: bool
) -> None:
    for component in (Component.ATTN_SCORES, Component.ATTN_VALUES):
        assert (refused(name, component, "fp8_e4m3") is None) == able
    assert refused(name, Component.ATTN_SOFTMAX, "fp8_e4m3") is None


@pytest.mark.parametrize(
    ("name", "able"),
    [("v100", False), ("t4", False), ("a100", True), ("h100", True), ("mi300x", True)],
)
def test_an_fp8_cache_needs_a_kernel_and_no_unit(name: str, able: bool) -> None:
    for narrow in ("fp8_e4m3", "fp8_e5m2"):
        reason = refused(name, Component.KV_CACHE, narrow)
        assert (reason is None) == able
        assert able or "no kernel reads an FP8 cache" in str(reason)
    assert refused(CPU, Component.KV_CACHE, "fp8_e4m3")


@pytest.mark.parametrize(
    ("engine", "e4m3", "e5m2"),
    [
        ("any", None, None),
        ("vllm", None, "vLLM refuses an e5m2 cache"),
        ("tensorrt_llm", None, "e4m3 only"),
        ("transformer_engine", "in 16 bits", "in 16 bits"),
        ("torchao", "linear layers", "e4m3 only"),
    ],
)
def test_which_engine_keeps_the_cache_in_fp8(
    engine: str, e4m3: str | None, e5m2: str | None
) -> None:
    for name, said in (("fp8_e4m3", e4m3), ("fp8_e5m2", e5m2)):
        reason = refused("h100", Component.KV_CACHE, name, engine=engine)
        assert reason is None if said is None else said in str(reason)


def test_a_cache_scale_for_each_head_is_for_hopper() -> None:
    # vLLM: "currently available only with the Flash Attention backend".
    for engine in ("any", "vllm"):
        by_head = refused("h100", Component.KV_CACHE, "fp8_e4m3_head", engine=engine)
        assert by_head is None
    assert "each head" in str(refused("a100", Component.KV_CACHE, "fp8_e4m3_head"))


def test_a_cpu_stores_fp8_and_has_no_unit_for_it() -> None:
    assert refused(CPU, Component.FFN_IN, "fp8_e4m3_weight_only") is None
    assert refused(CPU, Component.EMBEDDINGS, "fp8_e4m3") is None
    assert (
        refused(CPU, Component.FFN_IN, "fp8_e4m3") == "this processor has no FP8 unit"
    )
    assert refused(CPU, Component.FFN_IN, "fp32") is None
    assert refused(CPU, Component.FFN_IN, "bf16") is None


@pytest.mark.parametrize("component", Component)
def test_the_base_formats_stay_whatever_was_asked(component: Component) -> None:
    answers = refusals(device("h100"), "any", shape(component), ())
    assert {c.name for c, no in answers.items() if no is None} == {"fp32", "bf16"}


@pytest.mark.parametrize("component", Component)
def test_vllm_multiplies_matrices_in_sixteen_bits(component: Component) -> None:
    matrix = component in MATRICES
    for name, base in (("h100", "bf16"), ("t4", "fp16")):
        answers = refusals(device(name), "vllm", shape(component), ())
        left = {c.name for c, no in answers.items() if no is None}
        assert left == ({base} if matrix else {"fp32", base})


def test_a_format_that_was_not_asked_for_is_refused() -> None:
    only = ("bf16", "fp8_e5m2")
    assert refused("h100", Component.FFN_IN, "fp8_e5m2", formats=only) is None
    assert (
        refused("h100", Component.FFN_IN, "fp8_e4m3_weight_only", formats=only)
        == "fp8_e4m3 is not in search.formats"
    )


def test_vllm_takes_e4m3_linears_and_caches_and_nothing_else_narrow() -> None:
    able = LINEAR | {Component.KV_CACHE}
    for component, choices in CHOICES.items():
        for choice in choices:
            reason = refused("h100", component, choice.name, engine="vllm")
            e4m3 = choice.name.startswith("fp8_e4m3") and component in able
            fp32 = choice.name == "fp32" and component not in MATRICES
            assert (reason is None) == (e4m3 or fp32 or choice.name == "bf16")


@pytest.mark.parametrize(
    ("component", "name"),
    [
        (Component.FFN_IN, "fp8_e4m3_weight_only"),
        (Component.FFN_IN, "fp8_e4m3_token"),
        (Component.EMBEDDINGS, "fp8_e4m3"),
        (Component.ATTN_SOFTMAX, "fp8_e4m3"),
        (Component.FFN_ACT, "fp8_e5m2"),
        (Component.ATTN_SCORES, "fp8_e4m3_head"),
    ],
)
def test_transformer_engine_refuses(component: Component, name: str) -> None:
    assert "Transformer Engine" in str(
        refused("h100", component, name, engine="transformer_engine")
    )


@pytest.mark.parametrize("component", [Component.FFN_IN, Component.ATTN_SCORES])
def test_transformer_engine_takes_whole_tensors(component: Component) -> None:
    assert refused("h100", component, "fp8_e4m3", engine="transformer_engine") is None


def test_torchao_takes_e4m3_linears() -> None:
    assert refused("h100", Component.FFN_IN, "fp8_e4m3_token", engine="torchao") is None
    assert "e4m3 only" in str(
        refused("h100", Component.FFN_IN, "fp8_e5m2", engine="torchao")
    )
    assert "linear layers" in str(
        refused("h100", Component.ATTN_SCORES, "fp8_e4m3", engine="torchao")
    )


def test_no_choice_multiplies_e5m2_by_e5m2() -> None:
    for component, choices in CHOICES.items():
        for choice in choices if component is not Component.KV_CACHE else ():
            operands = [choice.input.format, choice.weight and choice.weight.format]
            assert operands != ["fp8_e5m2", "fp8_e5m2"]


@pytest.mark.parametrize("found", [*DEVICES.values(), CPU], ids=[*DEVICES, "cpu"])
def test_every_site_keeps_a_sixteen_bit_choice(found: Device) -> None:
    for engine, component in product(ENGINES, Component):
        answers = refusals(found, engine, shape(component), SWEPT_FORMATS)
        assert list(answers) == list(CHOICES[component])
        assert answers[choice_named(component, str(found.base16))] is None


def test_whole_model_sites_are_answered_too() -> None:
    head = SiteShape(Site(WHOLE_MODEL, Component.LM_HEAD), n=32000, k=4096)
    assert None in refusals(device("h100"), "any", head, ALL).values()


# What the tables of measured kernels call the formats whose rates the catalogue has.
TIMED = {"bf16": "bf16", "fp8": "fp8", "nvfp4": "fp4_e2m1", "int8": "int8"}


@pytest.mark.parametrize("name", ["a100", "l40s", "h100", "h200", "b200", "gb200"])
@pytest.mark.parametrize("engine", ["vllm", "trtllm"])
def test_no_measured_kernel_is_faster_than_the_peak(name: str, engine: str) -> None:
    measured = tables(name, engine)
    assert measured is not None
    for fmt, grid in measured.gemms.items():
        if TIMED.get(fmt) not in device(name).peak_flops:
            continue
        m, n, k = np.meshgrid(*grid.axes, indexing="ij")
        flops = 2.0 * m * n * k
        best = np.nanargmax(flops / grid.seconds)
        share = utilization(
            device(name), TIMED[fmt], float(flops.flat[best]), grid.seconds.flat[best]
        )
        # Were the peak a sparse one, the fastest bf16 kernel would reach half at most.
        assert share > (0.75 if fmt == "bf16" else 0.5), fmt
