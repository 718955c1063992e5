"""Measures the device of this process: `python -m workers.profiles MODEL`, and a task.

The task is for the worker whose device it is about, so it goes to that device's queue:
`celery -A workers.app call precision.profile_device --queue hw.h100 --args '["MODEL"]'`.
Both leave the profile in the data folder; jobs for that device use it from then on. That
of a processor is shown only: a job on `local` times whole runs of its own model, at its
own workload, on the very worker that it is for, which no sum of kernels is as near to.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog

from api import console, profiles
from api.settings import settings
from optimizer.errors import HardwareError, OptimizerError
from optimizer.hardware import LOCAL, device as catalogued
from optimizer.spec import Workload
from workers.app import app

PROFILE_DEVICE = "precision.profile_device"
USUAL = Workload()

NOT_KEPT = "not kept: a job on this processor times whole runs of its own model"

Profile = dict[str, Any]
Told = Callable[[float, str], None]

log = structlog.get_logger()


@app.task(name=PROFILE_DEVICE)
def profile_device(model: str, workload: dict[str, Any] | None = None) -> None:
    """Measure this worker's device over a model's shapes, and keep what came out."""
    made = measured(folder_of(model), Workload(**(workload or {})), "", _silent)
    where = profiles.store(made)
    log.info("device_profiled", device=made["device"], path=where and str(where))


def folder_of(model: str) -> Path:
    """Return the folder of a model: a path, or a name under one of the model roots."""
    roots = [root / model for root in settings().model_roots]
    return next((f for f in roots if f.is_dir()), Path(model))


def measured(model: Path, workload: Workload, named: str, told: Told) -> Profile:
    """Return the profile of the device of this process.

    `named` is its id in the catalogue; empty: by the name that the driver gives.
    Raises HardwareError for an unknown one, ModelError for what is no model.
    """
    import torch  # seconds, and never in the worker's parent

    from optimizer import device_state, local, profile
    from optimizer.stream import outline

    torch.set_num_threads(settings().threads or os.cpu_count() or 1)
    bench = profile.bench()
    own = named or device_state.catalogue_id(device_state.name())
    if bench.where.type != "cpu" and own == LOCAL:
        raise HardwareError(
            f"the catalogue does not know {device_state.name()!r}: name it (--device)"
        )
    target = local.device() if own == LOCAL else catalogued(own)
    shape = outline(model).shape
    before = device_state.state()
    rows = profile.measure(shape, workload, bench, target, told)
    return {
        "schema": profile.SCHEMA,
        "device": target.id,
        "engine": profile.ENGINE,
        "engine_version": str(torch.__version__),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **device_state.facts(),
        "model": model.name,
        "workload": {
            "batch_size": workload.batch_size,
            "prompt_tokens": workload.prompt_tokens,
            "output_tokens": workload.output_tokens,
        },
        "state_before": before,
        "state_after": device_state.state(),
        **rows,
    }


def _silent(fraction: float, detail: str) -> None:
    """Nobody watches."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, store and print. Returns 0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="a name under a model root, or a folder")
    parser.add_argument("--device", default="", help="its id in the catalogue")
    parser.add_argument("--batch-size", type=int, default=USUAL.batch_size)
    parser.add_argument("--prompt-tokens", type=int, default=USUAL.prompt_tokens)
    parser.add_argument("--output-tokens", type=int, default=USUAL.output_tokens)
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    asked = parser.parse_args(arguments)
    if asked.data_dir is not None:
        os.environ["PRECISION_DATA_DIR"] = str(asked.data_dir)
        settings.cache_clear()
    sizes = (asked.batch_size, asked.prompt_tokens, asked.output_tokens)
    if min(sizes) < 1:
        parser.error("a workload has at least one sequence, prompt and output token")
    workload = Workload(*sizes)
    try:
        with console.live_progress() as show:
            made = measured(
                folder_of(asked.model),
                workload,
                asked.device,
                lambda fraction, detail: show(_as_job(fraction, detail)),
            )
        where = profiles.store(made)
    except OptimizerError as error:
        print(error, file=sys.stderr)  # noqa: T201  a command's own output
        return 1
    if asked.json:
        print(json.dumps(made))  # noqa: T201
    else:
        _show(made, where)
    return 0


def _as_job(fraction: float, detail: str) -> Profile:
    """Return what the bar of a job reads."""
    progress = {"percent": 100 * fraction, "eta_seconds": None}
    running = {"status": "running", "request": {}}
    return {**running, "phase": detail, "progress": progress}


def _show(made: Profile, where: Path | None) -> None:
    columns = ("kernel", "format", "rows", "fixed, µs", "× roofline", "residual")
    rows = [
        (
            fit["kind"],
            fit["fmt"],
            fit["rows"],
            f"{1e6 * fit['fixed_s']:.1f}",
            f"{fit['factor']:.2f}",
            f"{fit['residual']:.0%}",
        )
        for fit in made["fits"]
    ]
    console.rows(columns, rows)
    console.out.print(
        f"{made['name']}, {made['threads']} threads, torch", highlight=False
    )
    kept = NOT_KEPT if where is None else f"profile: {where}"
    console.out.print(kept, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
