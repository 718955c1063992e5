import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer import device_state, kernels, profile
from optimizer.hardware import device
from optimizer.on_device import executed_on
from optimizer.profile import Bench
from optimizer.spec import Workload
from optimizer.stack import Component, ModelShape, Site, SiteShape
from tests.gpu import check

ROOT = Path(__file__).parents[2]
EMULATED = Bench(torch.device("cpu"), 1 << 10, ("bf16", "fp8"))
FFN = SiteShape(Site(0, Component.FFN_IN), 64, 32, 64 * 32, parts=(64,))
MODEL = ModelShape("one", 1, 32, 97, 64, 2048, 4096, False, (FFN,))
H100 = device("h100")


def test_without_a_gpu_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main([]) == 77
    said = capsys.readouterr().out.splitlines()
    assert said == ["gpu-check: no CUDA device here, nothing was measured"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_make_says_it_in_one_line_and_names_the_code() -> None:
    # `-o`: what is installed is not looked at. GNU make leaves with 2 whatever failed.
    asked = ["make", "-o", "install", "gpu-check"]
    alone = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    done = subprocess.run(
        asked, cwd=ROOT, env=alone, capture_output=True, text=True, check=False
    )
    said = "gpu-check: no CUDA device here, nothing was measured"
    assert done.stdout.splitlines() == [said]
    assert done.stderr.rstrip().endswith("Error 77")
    assert done.returncode == 2


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU by name, with or without FP8 units, and what the check would run on it."""
    ran: list[Any] = []

    def named(name: str, *formats: str) -> list[Any]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(
            profile, "bench", lambda: Bench(torch.device("cuda"), 1, formats)
        )
        monkeypatch.setattr(device_state, "name", lambda: name)
        monkeypatch.setattr(check, "run", lambda *args: ran.append(args))
        return ran

    return named


def test_a_gpu_without_fp8_units_is_skipped_too(
    gpu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu("NVIDIA A100-SXM4-80GB", "bf16")
    assert check.main([]) == 77
    assert "has no FP8 units" in capsys.readouterr().out


def test_a_gpu_is_known_by_its_name_or_named(gpu: Any) -> None:
    ran = gpu("NVIDIA H100 80GB HBM3", "bf16", "fp8")
    assert check.main([]) == 0
    model, work, _, target, _ = ran[0]
    assert (model.hidden, work.batch_size, target.id) == (3584, 1, "h100")
    ran = gpu("A prototype", "bf16", "fp8")
    assert check.main([]) == 1
    assert check.main(["--device", "h200"]) == 0
    assert ran[-1][3].id == "h200"


def test_a_device_that_is_none_is_answered_with_the_closest(
    gpu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = gpu("A prototype", "bf16", "fp8")
    assert check.main(["--device", "h1000"]) == 1
    assert "did you mean h100" in capsys.readouterr().out
    assert not ran


def test_its_help_names_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check.main(["--help"])
    assert "Exit code 77" in capsys.readouterr().out


@pytest.fixture(scope="module")
def every() -> list[check.Row]:
    return check.rows(MODEL, Workload(1, 4, 4), EMULATED, H100)


def test_the_emulated_backend_fills_the_table(every: list[check.Row]) -> None:
    lines = check.table(every)
    assert len({len(line) for line in lines}) == 1  # columns are aligned
    assert len(lines) == 1 + len(every)
    first = lines[1].split()
    assert len(first) == len(check.COLUMNS)
    assert first[:3] == ["1", "64", "32"]
    assert first[6:9] == ["-", "-", "-"]  # no graphs on a CPU
    ratio = every[0].bf16_s / every[0].fp8_s
    assert float(first[5]) == pytest.approx(ratio, rel=0.01)
    assert {r.m for r in every} == {1, 4, 16}


def test_errors_are_those_of_the_formats(every: list[check.Row]) -> None:
    for row in every:
        # bf16 rounds what float32 summed: half an ulp at most, relative 2^-9.
        assert 0 < row.bf16_error < 2.0**-9
        # e4m3 on both sides: 2^-4 at most for each number, less on average.
        assert 2.0**-7 < row.fp8_error < 2.0**-3.5
        assert row.emulated_error < 2.0**-9
        assert 0 < row.modelled_bf16_s < 1e-4


def test_what_the_model_cannot_say_is_not_in_the_table() -> None:
    a100 = device("a100")
    assert math.isnan(check._modelled_s((1, 64, 32), check.BY_ROW, a100))
    assert check._modelled_s((1, 64, 32), check.WIDE, a100) > 0


def test_everything_is_printed_and_written_as_a_profile(
    monkeypatch: pytest.MonkeyPatch,
    every: list[check.Row],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(check, "rows", lambda *args: every)
    out = tmp_path / "new" / "profile.json"
    check.run(MODEL, Workload(1, 4, 4), EMULATED, H100, out)
    said = capsys.readouterr().out
    assert "FP8 error" in said
    for name in ("fp8_e4m3", "fp8_e4m3_token", "fp8_e5m2"):
        assert f"torch._scaled_mm, {name}: 15 matrices beside their emulation" in said
    assert "Transformer Engine: its kernels are not installed" in said
    made = json.loads(out.read_text())
    assert (made["device"], made["graphs"]) == ("h100", False)
    assert made["executed_on"] == executed_on()
    tables = kernels.from_profile(made)
    for row in every:
        for fmt, seconds in (("bf16", row.bf16_s), ("fp8", row.fp8_s)):
            found = tables.gemm(fmt, row.m, row.n, row.k)
            assert found is not None
            assert found.seconds == pytest.approx(seconds)


def test_a_kernel_that_fails_is_a_line_of_the_report() -> None:
    class Failing:
        name = "a kernel"

        def takes(self, component: Component, choice: object) -> bool:
            return True

        def linear(self, *args: object) -> torch.Tensor:
            raise RuntimeError("no such instruction")

    from optimizer.calibrate import amaxes, calibrate
    from optimizer.execute import WeightCodes
    from tests.optimizer import tiny

    model = tiny.loaded("Qwen2ForCausalLM")
    found = amaxes(calibrate(model, [tiny.ids(12)]))
    lines = check.sites(Failing(), WeightCodes(model), model, found)
    assert len(lines) == 4
    assert lines[0] == "a kernel, fp8_e4m3: no such instruction"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_the_gpu_at_hand_passes_its_check(tmp_path: Path) -> None:
    assert check.main(["--out", str(tmp_path / "profile.json")]) in (0, check.SKIPPED)
