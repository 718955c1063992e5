"""`precision apply`: a stack.json and a model become what engines load, without a service."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from api import console
from api.operate import OperateError
from api.options import AsJson, emit
from optimizer.units import size

SHOWN = 8  # differences by reason; --json has all


def apply(
    stack: Annotated[Path, typer.Argument(help="A job's stack.json.")],
    model: Annotated[Path, typer.Argument(help="The folder of its model.")],
    out: Annotated[Path, typer.Option(help="A folder that is not there yet.")],
    exports: Annotated[
        list[str] | None,
        typer.Option("--export", help="As of `precision optimize`; again for several."),
    ] = None,
    data: Annotated[
        str, typer.Option(help="What static scales are calibrated on: the job's data.")
    ] = "web_text",
    calibration_tokens: Annotated[int, typer.Option(min=64)] = 2048,
    sequence_tokens: Annotated[int, typer.Option(min=32)] = 256,
    as_json: AsJson = False,
) -> None:
    """Write what engines load of STACK for MODEL; exit 1 if nothing can be written."""
    words = [str(stack), str(model), "--out", str(out), "--data", data]
    words += ["--calibration-tokens", str(calibration_tokens)]
    words += ["--sequence-tokens", str(sequence_tokens)]
    words += [word for name in exports or () for word in ("--export", name)]
    found = _run(words)
    emit(found, as_json, lambda found: _show(found, out))
    if not found["files"]:
        raise typer.Exit(1)


def _run(words: list[str]) -> dict[str, Any]:
    """Have a process with torch do it, which this one does without."""
    command = [sys.executable, "-m", "workers.apply", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it ended without a word"]
        raise OperateError(said[-1])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _show(found: dict[str, Any], out: Path) -> None:
    table = Table("file", "size", "read by", box=None, pad_edge=False)
    for file in found["files"]:
        table.add_row(file["name"], size(file["bytes"]), file["consumer"])
    if found["files"]:
        console.out.print(table)
    for one in found["refused"]:
        console.out.print(f"not written: {one['export']}: {one['reason']}")
    reasons: dict[tuple[str, str], int] = {}
    for one in found["deviations"]:
        key = (
            one["export"],
            f"{one['measured']} runs as {one['served']}: {one['reason']}",
        )
        reasons[key] = reasons.get(key, 0) + 1
    for (export, why), count in [*reasons.items()][:SHOWN]:
        console.out.print(f"{export}: {count} sites, {why}")
    console.out.print(f"folder: {out.resolve()}", soft_wrap=True)
