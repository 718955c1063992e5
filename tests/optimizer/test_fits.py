"""What kernels reach of the data sheet, and that the stored figures can be found again."""

import json
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from optimizer import fitting
from optimizer.fits import IDEAL, PARTS, Fit, Kernel, family, fit
from optimizer.fitting import (
    CACHED,
    KINDS,
    Rows,
    errors,
    families,
    fit_kernel,
    gathered,
    predicted,
    rows_of,
)
from optimizer.hardware import DEVICES, Device, device
from optimizer.kernels import tables

STORED = json.loads(files("optimizer").joinpath("data/fits.json").read_text("utf-8"))


def every(found: Fit) -> list[Kernel]:
    return [*found.gemms.values(), *(getattr(found, part) for part in PARTS)]


@pytest.mark.parametrize("each", DEVICES.values(), ids=DEVICES)
def test_no_efficiency_exceeds_the_data_sheet(each: Device) -> None:
    found = fit(each)
    for kernel in every(found):
        passes = kernel in (found.stream, found.scaled)  # through a cache
        assert 0 < kernel.bandwidth_share <= (CACHED if passes else 1)
        assert 0 < kernel.compute_share <= 1
        assert 1e-7 < kernel.fixed_s < 1e-4


def test_a_worker_has_measured_what_it_reaches() -> None:
    local = Device(
        id="local",
        name="here",
        peak_flops={},
        bandwidth_bytes_s=1.0,
        memory_bytes=1,
        native=frozenset(),
    )
    assert fit(local) is IDEAL


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("h100", "9.0"),
        ("h20", "9.0"),
        ("l4", "8.9"),
        ("b200", "10.0"),
        ("b300", "10.3"),
        ("gb300", "10.3"),
        ("rtx-5090", "12.0"),
        ("a10", "8.0"),
        ("v100", "8.0"),
        ("mi300x", "9.0"),  # an assumption, like every device that nobody timed
        ("gaudi3", "9.0"),
    ],
)
def test_a_device_has_the_fit_of_its_family(name: str, like: str) -> None:
    assert family(device(name)) == like


def test_ampere_has_no_pass_to_fp8_of_its_own() -> None:
    assert "scaled" not in STORED["families"]["8.0"]
    assert fit(device("a100")).scaled == fit(device("h100")).scaled
    assert fit(device("a100")).gemm("fp8") == fit(device("a100")).gemm("bf16")


def test_every_family_says_where_its_figures_are_from() -> None:
    for entry in STORED["families"].values():
        assert entry["origin"].startswith("aiconfigurator-core 0.12")
        assert "vllm" in entry["origin"]
        for kernel in [*entry["gemms"].values(), *(entry.get(p) for p in PARTS)]:
            assert kernel is None or kernel["rows"] > 100


def test_products_are_within_a_fifth_of_rows_that_the_fit_has_not_seen() -> None:
    for entry in STORED["families"].values():
        for kernel in (*entry["gemms"].values(), entry["context"], entry["generation"]):
            assert kernel["error"] < 0.2


# The fit


def made(fixed: float, bandwidth: float, compute: float, count: int = 400) -> Rows:
    """Rows that a roofline made, of work on both sides of the roof."""
    rng = np.random.default_rng(1)
    compute_s, memory_s = 10 ** rng.uniform(-7, -3, (2, count))
    beside = np.full(count, 1e-6)
    kernel = Kernel(fixed, bandwidth, compute)
    bare = Rows(compute_s, memory_s, beside, np.ones(count))
    return Rows(compute_s, memory_s, beside, predicted(kernel, bare))


def test_a_fit_finds_what_made_the_rows() -> None:
    found = fit_kernel(made(5e-6, 0.8, 0.6))
    assert found.fixed_s == pytest.approx(5e-6, rel=0.01)
    assert found.bandwidth_share == pytest.approx(0.8, rel=0.01)
    assert found.compute_share == pytest.approx(0.6, rel=0.01)
    assert found.error < 0.001


def test_a_fit_does_not_pass_its_bound() -> None:
    fast = made(5e-6, 1.5, 0.6)
    assert fit_kernel(fast).bandwidth_share == 1.0
    assert fit_kernel(fast, 2.0).bandwidth_share == pytest.approx(1.5, rel=0.01)


def test_a_fifth_of_the_rows_is_held_out_and_always_the_same() -> None:
    rows = made(5e-6, 0.8, 0.6)
    assert rows.held_out.sum() == 80
    assert (rows.held_out == made(1e-6, 0.5, 0.5).held_out).all()
    held = rows.of(rows.held_out)
    exact = errors(Kernel(5e-6, 0.8, 0.6), held)
    assert exact == pytest.approx(np.zeros(80))


def test_rows_are_what_the_tables_have_of_a_kind() -> None:
    known, a100 = tables("a100"), device("a100")
    assert known is not None
    for kind in KINDS:
        rows = rows_of(kind, a100, known)
        assert (len(rows.seconds) > 0) == (kind in ("bf16", "context", "generation"))
        assert (rows.seconds > 0).all()


def test_a_pass_beside_a_product_is_told_apart() -> None:
    known, h100 = tables("h100"), device("h100")
    assert known is not None
    assert (rows_of("fp8", h100, known).beside_s > 0).all()
    assert (rows_of("bf16", h100, known).beside_s == 0).all()


def test_rows_of_passes_and_attention_have_the_sizes_that_they_move() -> None:
    known, h100 = tables("h100"), device("h100")
    assert known is not None
    passes = rows_of("stream", h100, known)
    assert (passes.compute_s == 0).all()
    # The largest is 32768 × 65536 values at most, of 3 bytes at 3350 GB/s.
    assert passes.memory_s.max() <= 3 * 32768 * 65536 / 3.35e12
    for kind in ("context", "generation"):
        rows = rows_of(kind, h100, known)
        # No kernel is faster than its products, or its bytes, at the data sheet's rates.
        assert (rows.seconds > rows.compute_s).all()
    assert len(rows_of("nvfp4", h100, known).seconds) == 0


def test_the_stored_fit_of_ampere_is_found_again() -> None:
    found = families()["8.0"]
    assert [d.id for d, _ in found] == ["a100"]
    entry = STORED["families"]["8.0"]
    for kind, stored in (
        ("bf16", entry["gemms"]["bf16"]),
        ("context", entry["context"]),
    ):
        again = fit_kernel(gathered(kind, found))
        for name in Kernel.__slots__:
            # The solver's last digits follow the machine's.
            assert getattr(again, name) == pytest.approx(stored[name], rel=0.01)


def test_the_command_writes_every_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"8.0": families()["8.0"]}
    monkeypatch.setattr(fitting, "families", lambda: few)
    fitting.main(["--out", str(tmp_path / "fits.json")])
    written = json.loads((tmp_path / "fits.json").read_text("utf-8"))
    assert written["families"].keys() == {"8.0"}
    assert written["families"]["8.0"]["origin"].endswith("a100 (vllm 0.14.0)")
