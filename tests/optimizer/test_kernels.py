"""Kernel times: what the shipped tables say, and what they do not."""

import pytest

from optimizer.kernels import Basis, tables


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
    assert below < timing.seconds < above
    assert 0 < timing.error < 0.1


@pytest.mark.parametrize(
    "shape", [(0, 4096, 4096), (40000, 4096, 4096), (1, 152064, 3584), (1, 16, 4096)]
)
def test_outside_the_grid_there_is_no_time(h100, shape):
    assert h100.gemm("bf16", *shape) is None


def test_a_device_or_engine_that_nobody_timed_has_no_tables():
    assert tables("v100") is None
    assert tables("h100", "nothing") is None
