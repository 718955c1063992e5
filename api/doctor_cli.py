"""`precision doctor`: what a training run's log looks like. Needs no service."""

from pathlib import Path
from typing import Annotated, Any

import typer

from api import console_doctor
from api.operate import OperateError
from api.options import AsJson, emit

FOUND = 3


def doctor(
    log: Annotated[
        Path,
        typer.Argument(
            metavar="LOG",
            help="JSON lines, trainer_state.json, TensorBoard's events, or a folder "
            "that has one of them.",
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Say what a training run's LOG looks like; exit 3 if something is wrong."""
    # Other commands do without.
    from optimizer.training.doctor import diagnose
    from optimizer.training.findings import Verdict
    from optimizer.training.log_files import read_log
    from optimizer.training.logs import LogError

    try:
        found: dict[str, Any] = diagnose(read_log(log)).to_json()
    except LogError as error:
        raise OperateError(str(error)) from None
    emit(found, as_json, console_doctor.diagnosis)
    if found["verdict"] != Verdict.NOTHING_WRONG:
        raise typer.Exit(FOUND)
