"""`precision apply`: a stack.json becomes the files of the job that it came from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from api.cli import main as precision
from optimizer.checkpoint import fingerprint
from optimizer.spec import OptimizeSpec
from optimizer.stack_file import StackFile
from tests.optimizer.exporting import DENSE, Exported, exported
from tests.service import tiny_model
from workers import apply

OPTIONS = ["--calibration-tokens", "128", "--sequence-tokens", "64"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    spec = OptimizeSpec(
        model="tiny",
        model_path=str(model),
        model_sha256=fingerprint(model),
        hardware="h100",
        calibration_tokens=128,
        validation_tokens=128,
        sequence_tokens=64,
    )
    return exported(spec, tmp_path_factory.mktemp("out"), DENSE)


@pytest.fixture
def stack(made: Exported, tmp_path: Path) -> Callable[..., Path]:
    """Write the job's stack.json, with changes that somebody made."""

    def write(**changes: Any) -> Path:
        file = StackFile(made.stack, made.work.spec.model_sha256, "tiny", "h100")
        path = tmp_path / "stack.json"
        path.write_text(json.dumps({**file.to_json(), **changes}))
        return path

    return write


def test_the_files_are_those_of_the_job(
    made: Exported, model: Path, stack: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert apply.main([str(stack()), str(model), "--out", str(out), *OPTIONS]) == 0
    theirs = {p.relative_to(made.folder) for p in made.folder.rglob("*.*")}
    assert {p.relative_to(out) for p in out.rglob("*.*")} == theirs
    for name in theirs:
        assert (out / name).read_bytes() == (made.folder / name).read_bytes(), name


def test_the_command_shows_what_it_wrote(
    model: Path,
    stack: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    words = ["apply", str(stack()), str(model), "--out", str(out), *OPTIONS]
    with pytest.raises(SystemExit) as end:
        precision([*words, "--export", "compressed_tensors"])
    printed = capsys.readouterr().out
    assert end.value.code in (0, None)
    assert "checkpoint/model.safetensors" in printed
    assert str(out) in printed
    assert max(map(len, printed.splitlines()[:-1])) <= 80


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"sha256": "b" * 64}}, "made for the model bbbbbbbbbbbb…"),
        ({"stack": {"lm_head": "bf16"}}, "/stack/norms: missing"),
        ({"stack": {"lm_head": "fp9"}}, "has no choice 'fp9'"),
        ({"hardware": "a100"}, "/stack/layers.0.attn_qkv: fp8_e4m3: "),
        ({"colour": "red"}, "/colour: unknown"),
    ],
)
def test_what_cannot_be_applied_is_named(
    model: Path,
    stack: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    said: str,
) -> None:
    out = tmp_path / "out"
    path = stack(**changes)
    assert apply.main([str(path), str(model), "--out", str(out), *OPTIONS]) == 1
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_a_folder_with_something_in_it_is_left_alone(
    model: Path, stack: Callable[..., Path], tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "mine").write_text("x")
    words = [str(stack()), str(model), "--out", str(tmp_path)]
    assert apply.main(words) == 1
    assert "is not an empty folder" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "x"
