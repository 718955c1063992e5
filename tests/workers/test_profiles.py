"""The device of a worker is measured, kept, and found by the jobs for it."""

import json
import os
from pathlib import Path

import pytest

from api import profiles, settings
from optimizer import device_state, profile
from optimizer.errors import HardwareError
from tests.service import tiny_model
from workers import profiles as command
from workers.profiles import folder_of, main, measured, profile_device

SMALL = ["--prompt-tokens", "8", "--output-tokens", "4"]


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a data folder with one model, and a clock that is soon content."""
    tiny_model(tmp_path / "models" / "tiny")
    monkeypatch.setenv("PRECISION_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(profile, "LIMIT_S", 0.0)
    monkeypatch.setattr(profile, "SAMPLE_S", 0.0)
    monkeypatch.setattr(profile, "cpu_cache", lambda: 1)
    settings.settings.cache_clear()
    return tmp_path


def test_the_command_measures_this_machine_and_jobs_find_it(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # This processor under a GPU's name: whose jobs would use what is found.
    assert profiles.tables("h100") is None
    asked = ["tiny", "--device", "h100", "--data-dir", str(data_dir), "--json", *SMALL]
    assert main(asked) == 0
    printed = json.loads(capsys.readouterr().out)
    stored = json.loads((data_dir / "profiles" / "h100.json").read_text())
    assert printed == stored
    assert stored["name"] == device_state.name()
    assert stored["threads"] == os.cpu_count()
    assert {"state_before", "state_after", "versions", "measured_at"} <= stored.keys()
    assert stored["workload"]["prompt_tokens"] == 8
    found = profiles.tables("h100")
    assert found is not None
    row = stored["gemm"][0]
    timing = found.gemm(row["fmt"], row["m"], row["n"], row["k"])
    assert timing is not None
    assert timing.seconds == row["seconds"]
    assert timing.error == row["spread"]


def test_people_get_a_table_and_the_place(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tiny", "--device", "h100", *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "generation_attention" in printed
    assert str(data_dir / "profiles" / "h100.json") in printed


def test_what_a_processor_takes_is_shown_and_not_kept(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tiny", *SMALL]) == 0
    assert "not kept: a job on this processor times whole runs" in (
        capsys.readouterr().out
    )
    profile_device("tiny", {"batch_size": 1, "prompt_tokens": 8, "output_tokens": 4})
    assert not (data_dir / "profiles").exists()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["nothing"], "nothing"),
        (["tiny", "--device", "h9000"], "unknown hardware 'h9000'"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(
    arguments: list[str],
    why: str,
    data_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*arguments, *SMALL]) == 1
    assert why in capsys.readouterr().err.splitlines()[-1]


def test_a_workload_of_nothing_is_refused(data_dir: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["tiny", "--batch-size", "0"])
    assert stopped.value.code == 2


def test_an_accelerator_that_the_catalog_does_not_know_must_be_named(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    strange = profile.Bench(torch.device("meta"), 1, ("bf16",))
    monkeypatch.setattr(profile, "bench", lambda: strange)
    with pytest.raises(HardwareError, match="name it"):
        measured(data_dir / "models" / "tiny", command.USUAL, "", command._silent)


def test_the_task_keeps_what_it_measured(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_state, "catalogue_id", lambda name: "h100")
    profile_device("tiny", {"batch_size": 1, "prompt_tokens": 8, "output_tokens": 4})
    assert profiles.tables("h100") is not None


def test_a_model_is_a_name_or_a_folder(data_dir: Path) -> None:
    assert folder_of("tiny") == data_dir / "models" / "tiny"
    assert folder_of("/elsewhere/tiny") == Path("/elsewhere/tiny")


def test_a_file_that_is_no_profile_is_an_error(data_dir: Path) -> None:
    (data_dir / "profiles").mkdir()
    (data_dir / "profiles" / "h100.json").write_text('{"schema": 9}')
    with pytest.raises(HardwareError, match="schema 9"):
        profiles.tables("h100")
