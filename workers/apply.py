"""Exports of a stack.json without a service: `python -m workers.apply`.

What `precision apply` runs. Static scales and compensated weights come from the data
that is named: with that of the job, the files are the job's, byte by byte.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optimizer import stack_file
from optimizer.checkpoint import fingerprint
from optimizer.errors import OptimizerError, SpecError
from optimizer.export_files import Outlet
from optimizer.exports import Chosen, export
from optimizer.hardware import DEVICES, device
from optimizer.pieces import Memory
from optimizer.spec import EXPORTS, SWEPT_FORMATS, OptimizeSpec
from optimizer.stack_file import StackFile
from optimizer.work import Work

UNNAMED = "h100"  # the device of a file that names none: nothing depends on it


def apply(
    file: StackFile, model: Path, out: Path, asked: argparse.Namespace
) -> dict[str, Any]:
    """Write the exports of a stack into a new folder; return what came of each.

    Raises StackFileError where the stack is not the model's, and what else the
    optimizer raises for a model or data.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SpecError(f"{out} is there already, and is not an empty folder")
    work = Work(_spec(file, model, asked), Memory())
    target = device(file.hardware) if file.hardware in DEVICES else None
    shape, sha256 = work.outline.shape, work.spec.model_sha256
    stack_file.check(file, shape, sha256, target)
    out.mkdir(parents=True, exist_ok=True)
    return export(work, Chosen(file.stack, file.rounding, None), Outlet(out))


def _spec(file: StackFile, model: Path, asked: argparse.Namespace) -> OptimizeSpec:
    own = asked.data.endswith(".jsonl")
    return OptimizeSpec(
        model=file.model or model.name,
        model_path=str(model),
        model_sha256=fingerprint(model),
        hardware=file.hardware or UNNAMED,
        data_distribution=Path(asked.data).stem if own else asked.data,
        dataset_path=str(Path(asked.data).resolve()) if own else None,
        formats=SWEPT_FORMATS,
        rounding=file.rounding,
        calibration_tokens=asked.calibration_tokens,
        sequence_tokens=asked.sequence_tokens,
        exports=tuple(asked.export or EXPORTS),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was written as JSON; 1 and the reason where nothing was."""
    parser = argparse.ArgumentParser(prog="python -m workers.apply")
    parser.add_argument("stack", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--export", action="append", choices=EXPORTS)
    parser.add_argument("--data", default="web_text")
    parser.add_argument("--calibration-tokens", type=int, default=2048)
    parser.add_argument("--sequence-tokens", type=int, default=256)
    asked = parser.parse_args(arguments)
    try:
        file = stack_file.read(asked.stack.read_bytes())
        found = apply(file, asked.model, asked.out, asked)
    except (OptimizerError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(found, allow_nan=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
