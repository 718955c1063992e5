"""What a document says about where its seconds are from."""

import math
from dataclasses import replace

import pytest

from optimizer.cost import SiteCost
from optimizer.document_latency import MEASURED, basis_shares, expected_error, latency
from optimizer.hardware import device
from optimizer.kernels import Basis

H100 = device("h100")


def site(seconds: float, basis: Basis, error: float = 0.1) -> SiteCost:
    return SiteCost(seconds, 1.0, 0, 0, basis, error)


MIXED = [
    site(3e-6, Basis.KERNELS, 0.02),
    site(1e-6, Basis.ROOFLINE, 0.10),
    site(4e-6, Basis.KERNELS, 0.02),
]


def test_shares_are_of_the_seconds_and_the_largest_comes_first() -> None:
    found = basis_shares(MIXED)
    assert list(found) == [Basis.KERNELS, Basis.ROOFLINE]
    assert found[Basis.KERNELS] == pytest.approx(7 / 8)


def test_errors_of_sites_add_up_by_their_seconds() -> None:
    # (7 · 0.02 + 1 · 0.10) / 8
    assert expected_error(MIXED) == pytest.approx(0.03)
    unknown = replace(MIXED[0], error=math.nan)
    assert expected_error([*MIXED, unknown]) is None


def test_kernels_are_named_with_engine_version_and_source() -> None:
    found = latency(H100, "modelled", MIXED)
    assert found["method"] == (
        "measured kernels of vllm 0.24.0, aiconfigurator-core 0.12.0 (88% of the time), "
        "roofline fitted to aiconfigurator-core 0.12.0: h100 (vllm 0.24.0), h200 (vllm 0.24.0) "
        "(12% of the time)"
    )
    assert found["basis_shares"] == {"kernels": 7 / 8, "roofline": 1 / 8}
    assert (found["engine"], found["engine_version"]) == ("vllm", "0.24.0")
    assert found["origin"] == "aiconfigurator-core 0.12.0"
    assert found["expected_error"] == pytest.approx(0.03)


def test_kernels_are_those_of_the_engine_that_is_named() -> None:
    found = latency(H100, "modelled", MIXED[:1], "tensorrt_llm")
    assert (found["engine"], found["engine_version"]) == ("trtllm", "1.3.0rc20")
    assert "in place of" not in found["method"]
    other = latency(H100, "modelled", MIXED[:1], "torchao")
    assert other["engine"] == "vllm"
    assert "aiconfigurator-core 0.12.0, in place of torchao's" in other["method"]


def test_a_roofline_alone_names_no_engine() -> None:
    found = latency(device("v100"), "modelled", [site(1e-6, Basis.ROOFLINE)])
    assert found["method"].startswith("roofline fitted to ")
    assert found["engine"] is found["engine_version"] is found["origin"] is None


def test_what_a_worker_took_is_its_own() -> None:
    here = [site(1e-6, Basis.MEASURED)]
    assert latency(H100, "measured", here)["method"] == MEASURED
    partly = latency(H100, "modelled", [*here, site(1e-6, Basis.ROOFLINE)])
    assert partly["method"].startswith(
        "kernels timed on the device itself (50% of the time)"
    )
