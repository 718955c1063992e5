"""`precision hardware profile` starts a process that may load torch, and returns its code."""

import subprocess
import sys

import pytest

from api.cli import main


@pytest.mark.parametrize("code", [0, 1])
def test_the_machine_is_measured_in_a_process_of_its_own(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], check: bool) -> "subprocess.CompletedProcess[str]":
        commands.append(command)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(subprocess, "run", run)
    options = ["--batch-size", "4", "--json", "--data-dir", "data"]
    with pytest.raises(SystemExit) as ended:
        main(["hardware", "profile", "tiny", *options])
    assert ended.value.code == code
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "workers.profiles", "tiny"]
    assert command[command.index("--batch-size") + 1] == "4"
    assert command[command.index("--data-dir") + 1] == "data"
    assert command[-1] == "--json"
    with pytest.raises(SystemExit):
        main(["hardware", "profile", "tiny"])
    assert "--json" not in commands[-1]
