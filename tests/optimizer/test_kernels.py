"""Kernel times: what the shipped tables say, and what they do not."""

import math
from importlib.resources import files

import numpy as np
import pytest

from optimizer.errors import HardwareError
from optimizer.hardware import DEVICES
from optimizer.kernels import Basis, from_profile, tables

SHIPPED = sorted(
    tuple(path.name.split(".")[:2])
    for path in files("optimizer").joinpath("data/kernels").iterdir()
    if path.name.endswith(".npz")
)
GEMM_BYTES = {"bf16": 2, "fp8": 1, "fp8_block": 1, "nvfp4": 9 / 16, "int8": 1}
PEAKS = {"fp8_block": "fp8", "nvfp4": "fp4_e2m1", "int8_wo": "bf16", "int4_wo": "bf16"}
GEMM_BYTES |= {"int8_wo": 1, "int4_wo": 0.5}


@pytest.fixture(scope="module")
def h100():
    known = tables("h100")
    assert known is not None
    return known


def test_the_tables_say_where_they_come_from(h100):
    assert (h100.device, h100.engine, h100.version) == ("h100", "vllm", "0.24.0")
    assert h100.basis is Basis.KERNELS
    assert h100.origin == "aiconfigurator-core 0.12.0"
    assert "Apache-2.0" in h100.facts["license"]


def test_the_license_lies_beside_the_tables():
    folder = files("optimizer").joinpath("data/kernels")
    assert "Apache License" in folder.joinpath("LICENSE").read_text("utf-8")
    assert "NVIDIA CORPORATION" in folder.joinpath("NOTICE").read_text("utf-8")


@pytest.mark.parametrize(("device", "engine"), SHIPPED)
def test_every_table_is_of_a_device_of_the_catalogue(device, engine):
    known = tables(device, engine)
    assert device in DEVICES
    assert (known.device, known.engine) == (device, engine)
    assert "bf16" in known.gemms
    assert known.generation
    assert known.context
    assert known.reductions


@pytest.mark.parametrize(("device", "engine"), SHIPPED)
def test_no_gemm_beats_the_data_sheet(device, engine):
    known = tables(device, engine)
    sheet = DEVICES[device]
    for fmt, grid in known.gemms.items():
        m, n, k = np.meshgrid(*grid.axes, indexing="ij")
        moved = GEMM_BYTES[fmt] * n * k + 2.0 * m * (n + k)
        peak = sheet.peak_flops[PEAKS.get(fmt, fmt)]
        limit = np.maximum(2.0 * m * n * k / peak, moved / sheet.bandwidth_bytes_s)
        measured = ~np.isnan(grid.seconds)
        # Four digits: half of the last one may be lost.
        assert np.all(grid.seconds[measured] >= limit[measured] * (1 - 5e-4))


@pytest.mark.parametrize(("device", "engine"), SHIPPED)
def test_no_decode_step_reads_its_cache_faster_than_the_memory(device, engine):
    known = tables(device, engine)
    for (fmt, head_dim, window), section in known.generation.items():
        for (_, kv_heads), grid in section.grids.items():
            batch, context = np.meshgrid(*grid.axes, indexing="ij")
            seen = np.minimum(context, window) if window else context
            size = 1 if fmt == "fp8" else 2
            moved = 2.0 * size * batch * seen * kv_heads * head_dim
            limit = moved / DEVICES[device].bandwidth_bytes_s
            measured = ~np.isnan(grid.seconds)
            assert np.all(grid.seconds[measured] >= limit[measured] * (1 - 5e-4))


@pytest.mark.slow
@pytest.mark.parametrize(("device", "engine"), SHIPPED)
def test_interpolation_misses_by_less_than_a_tenth(device, engine):
    known = tables(device, engine)
    asked = [
        *(("gemm", fmt) for fmt in known.gemms),
        *(("context_attention", fmt) for fmt, _, _ in known.context),
        *(("generation_attention", fmt) for fmt, _, _ in known.generation),
        *(("quantize", fmt) for fmt in known.casts),
        *(("all_reduce", str(n)) for n in known.reductions),
    ]
    for op, fmt in dict.fromkeys(asked):
        errors = known.leave_one_out(op, fmt)
        assert errors.size
        assert np.median(np.abs(errors)) < 0.1


@pytest.mark.parametrize(
    ("op", "fmt"),
    [("gemm", "fp4"), ("context_attention", "int8"), ("all_reduce", "3")],
)
def test_of_what_was_not_measured_nothing_can_be_left_out(h100, op, fmt):
    assert h100.leave_one_out(op, fmt).size == 0


@pytest.mark.parametrize(
    ("fmt", "n", "k", "microseconds"),
    [  # one token, as the package has them
        ("bf16", 4096, 4096, 15.05),
        ("fp8", 4096, 4096, 13.77),
        ("bf16", 65536, 4096, 218.0),
    ],
)
def test_a_measured_gemm_is_answered_to_four_digits(h100, fmt, n, k, microseconds):
    timing = h100.gemm(fmt, 1, n, k)
    assert timing.seconds * 1e6 == pytest.approx(microseconds, rel=1e-3)
    assert timing.error == 0


def test_between_measured_gemms_the_time_lies_between_theirs(h100):
    below, above = (h100.gemm("bf16", 1, 4096, k).seconds for k in (12288, 16384))
    timing = h100.gemm("bf16", 1, 4096, 14336)
    assert timing.seconds == pytest.approx((below + above) / 2)  # 14336 is halfway
    assert 0 < timing.error < 0.1


@pytest.mark.parametrize(
    "shape", [(0, 4096, 4096), (40000, 4096, 4096), (1, 152064, 3584), (1, 16, 4096)]
)
def test_outside_the_grid_there_is_no_time(h100, shape):
    assert h100.gemm("bf16", *shape) is None


def test_an_fp8_cache_is_read_faster_where_the_context_is_long(h100):
    shape = (64, 8192, 32, 8, 128)
    narrow = h100.generation_attention("fp8", *shape)
    wide = h100.generation_attention("bf16", *shape)
    assert narrow.seconds < 0.7 * wide.seconds


def test_attention_of_a_layout_that_nobody_timed_has_no_time(h100):
    assert h100.context_attention("bf16", 1, 512, 32, 32, 96) is None
    assert h100.generation_attention("bf16", 1, 512, 32, 32, 96) is None


def test_heads_that_were_not_timed_are_those_of_a_larger_batch(h100):
    folded = h100.generation_attention("bf16", 1, 512, 32, 32, 128)
    same = h100.generation_attention("bf16", 4, 512, 8, 8, 128)
    assert folded.seconds == same.seconds
    assert same.error < folded.error < 0.1


def test_a_device_or_engine_that_nobody_timed_has_no_tables():
    assert tables("v100") is None
    assert tables("h100", "nothing") is None


def test_ampere_has_no_fp8_to_time():
    known = tables("a100")
    assert known.gemm("fp8", 1, 4096, 4096) is None
    assert known.quantize(1, 4096) is None
    assert known.all_reduce(3, 8192) is None


def gemm_row(**more):
    row = {"fmt": "bf16", "m": 1, "n": 576, "k": 576, "seconds": 1e-5, "spread": 0.02}
    return row | more


def profile(**more):
    return {
        "schema": 1,
        "device": "local",
        "engine": "torch",
        "engine_version": "2.13.0",
        "driver": "none",
        "measured_at": "2026-12-01T12:00:00Z",
        **more,
    }


def test_a_profile_answers_what_it_measured_with_its_spread():
    known = from_profile(profile(gemm=[gemm_row()]))
    timing = known.gemm("bf16", 1, 576, 576)
    assert (timing.seconds, timing.error) == (1e-5, 0.02)
    assert known.basis is Basis.MEASURED
    assert (known.device, known.engine, known.version) == ("local", "torch", "2.13.0")
    assert known.origin == "measured at 2026-12-01T12:00:00Z"
    assert known.facts["driver"] == "none"
    assert "gemm" not in known.facts


def test_a_profile_is_read_along_the_tokens_of_one_shape():
    rows = [gemm_row(m=m, seconds=m * 1e-6) for m in (1, 8, 64)]
    other = [gemm_row(m=m, n=1536, seconds=m * 3e-6) for m in (1, 16, 64)]
    known = from_profile(profile(gemm=[*rows, *other]))
    assert known.gemm("bf16", 36, 576, 576).seconds == pytest.approx(36e-6)
    # Between two shapes of a model there is nothing to read.
    assert known.gemm("bf16", 36, 1000, 576) is None


def test_two_sizes_say_nothing_about_what_lies_between():
    rows = [gemm_row(m=m, seconds=m * 1e-6) for m in (1, 64)]
    known = from_profile(profile(gemm=rows))
    assert known.gemm("bf16", 64, 576, 576) is not None
    assert known.gemm("bf16", 8, 576, 576) is None


def test_the_last_of_equal_rows_counts():
    known = from_profile(profile(gemm=[gemm_row(), gemm_row(seconds=2e-5)]))
    assert known.gemm("bf16", 1, 576, 576).seconds == 2e-5


def test_a_profile_has_the_other_kernels_too():
    heads = {"heads": 9, "kv_heads": 3, "head_dim": 64, "batch": 1}
    time = {"seconds": 1e-5, "spread": 0.02}
    known = from_profile(
        profile(
            context_attention=[{"kv_fmt": "bf16", "tokens": 64, **heads, **time}],
            generation_attention=[
                {"kv_fmt": "fp8", "context": 65, "window": 32, **heads, **time}
            ],
            quantize=[
                {"rows": 1, "columns": 576, **time},
                {"rows": 1, "columns": 576, "dynamic": True, **time, "seconds": 2e-5},
            ],
            all_reduce=[{"gpus": 2, "bytes": 1152, **time}],
        )
    )
    assert known.context_attention("bf16", 1, 64, 9, 3, 64).seconds == 1e-5
    assert known.context_attention("bf16", 1, 64, 9, 3, 64).error == 0.02
    assert known.generation_attention("fp8", 1, 65, 9, 3, 64) is None
    assert known.generation_attention("fp8", 1, 65, 9, 3, 64, 32).seconds == 1e-5
    assert known.quantize(1, 576).seconds == 1e-5
    assert known.quantize(1, 576, dynamic=True).seconds == 2e-5
    assert known.all_reduce(2, 1152).seconds == 1e-5


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"schema": 2}, "schema 2"),
        ({"gemm": [gemm_row(seconds=0.0)]}, "took no time"),
        ({"gemm": [gemm_row(seconds=math.nan)]}, "took no time"),
        ({"gemm": [{"fmt": "bf16", "m": 1}]}, "without 'n'"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(wrong, said):
    with pytest.raises(HardwareError, match=said):
        from_profile(profile(**wrong))
