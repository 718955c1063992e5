"""What holds for every command: JSON, narrow terminals, completion in a shell."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from api.cli import app
from tests.api.conftest import Run

READ = (
    ("jobs", "list"),
    ("jobs", "get", "JOB"),
    ("jobs", "cancel", "JOB"),
    ("models", "list"),
    ("datasets", "list"),
    ("hardware", "list"),
    ("hardware", "show", "h100"),
    ("keys", "list"),
    ("tenants", "list"),
    ("tenants", "limits", "acme"),
    ("webhooks", "list"),
    ("bits", "0.1"),
    ("bits", "0.1", "--format", "bf16"),
    ("estimate", "qwen2-7b", "--hardware", "h100", "--sla", "20ms", "--train", "lora"),
)
NARROW = 40


def commands(group: Any, *before: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command that is no group, with its words."""
    for name, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from commands(one, *before, name)
        else:
            yield (*before, name), one


EVERY = dict(commands(get_command(app)))


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_every_command_prints_json_where_it_is_asked_to(words: tuple[str, ...]) -> None:
    assert "--json" in [name for each in EVERY[words].params for name in each.opts]


def meant(words: tuple[str, ...], job: str) -> list[str]:
    return [job if word == "JOB" else word for word in words]


@pytest.mark.parametrize("words", READ, ids=" ".join)
def test_stdout_is_one_json_value(
    precision: Run, done: str, words: tuple[str, ...]
) -> None:
    code, out, err = precision(*meant(words, done), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) is not None


def test_events_are_one_json_value_a_line(precision: Run, done: str) -> None:
    code, out, _ = precision("jobs", "events", done, "--json")
    found = [json.loads(line)["type"] for line in out.splitlines()]
    assert (code, found[-1]) == (0, "job.succeeded")


def test_what_is_deleted_is_named_in_json(precision: Run, done: str) -> None:
    code, out, err = precision("jobs", "delete", done, "--json")
    assert (code, json.loads(out), err) == (0, {"deleted": done}, "")


def test_a_report_has_one_form(precision: Run, done: str) -> None:
    code, out, _ = precision("report", done, "--json")
    assert (code, json.loads(out)["schema"]) == (0, "precision.report/1")
    code, _, err = precision("report", done, "--json", "--html")
    assert (code, "name one form" in err) == (2, True)


@pytest.mark.parametrize("words", READ, ids=" ".join)
@pytest.mark.parametrize("columns", [NARROW, 80])
def test_what_is_listed_fits_the_terminal(
    precision: Run,
    done: str,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    columns: int,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = precision(*meant(words, done))
    assert code == 0, err
    wide = [line for line in out.splitlines() if len(line) > columns]
    assert wide == []
    if words == ("jobs", "list"):
        assert done in out  # in one piece


def test_events_are_said_in_words(precision: Run, done: str) -> None:
    _, out, _ = precision("jobs", "events", done)
    assert "A worker took it" in out
    assert out.splitlines()[-1].endswith("Succeeded: SLA met")


def test_bash_completes_commands(tmp_path: Path) -> None:
    script = (
        'set -e; eval "$(precision --show-completion bash)"; '
        "COMP_WORDS=(precision jobs ''); COMP_CWORD=2; "
        '_precision_completion precision; printf "%s " "${COMPREPLY[@]}"'
    )
    beside = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PATH": beside, "SHELL": "/bin/bash"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = [words[1] for words in EVERY if words[0] == "jobs"]
    assert done.stdout.split() == names
