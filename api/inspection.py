"""What strangers uploaded, looked at in a process whose limits nothing can pass."""

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

import optimizer
from api.errors import APIError, Invalid, Unavailable
from optimizer.errors import OptimizerError

SMALL_BYTES = 1 << 20  # of a dataset: starting a process takes longer than reading it
WALL_S = 120.0
BYTES_PER_S = 5_000_000  # a disk that is slower than this is broken

THEIR_FAULT = (signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)

Found = dict[str, Any]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class KeptData:
    """A dataset that was checked: the file that jobs will read, and what is in it."""

    path: Path
    sha256: str
    samples: int
    bytes: int


def model(folder: Path) -> Found:
    """Return what a model folder holds, as `optimizer.preflight` says it.

    Raises Invalid naming the file or the tensor at fault.
    """
    size = sum(path.stat().st_size for path in folder.iterdir())
    return _ask(size, "model", str(folder))


def dataset(file: Path, kept: Path) -> KeptData:
    """Check every line; what jobs will read is written to `kept`. Raises Invalid."""
    kept.unlink(missing_ok=True)
    size = file.stat().st_size
    if size <= SMALL_BYTES:
        found = _here(file, kept)
    else:
        found = _ask(size, "dataset", str(file), str(kept))
    return KeptData(path=kept, **found)


def _here(file: Path, kept: Path) -> Found:
    from optimizer import preflight

    try:
        return preflight.look_at_dataset(file, kept)
    except OptimizerError as error:
        raise Invalid("", str(error), error.code) from None


def _ask(size: int, *arguments: str) -> Found:
    """Run the preflight with no environment but where our own code is."""
    command = [sys.executable, "-P", "-s", "-m", "optimizer.preflight", *arguments]
    (package,) = optimizer.__path__
    try:
        done = subprocess.run(
            command,
            cwd="/",
            env={"PYTHONPATH": str(Path(package).parent), "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=WALL_S + size / BYTES_PER_S,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable("reading the upload takes too long; try again") from None
    if done.returncode:
        raise _killed(done.returncode, done.stderr)
    found: Found = json.loads(done.stdout)
    if error := found.get("error"):
        raise Invalid("", error["detail"], error["code"])
    return found


def _killed(code: int, said: bytes) -> APIError:
    """Return what became of a process that ended without an answer."""
    if -code in THEIR_FAULT:
        detail = "reading it takes more time or memory than a model or dataset needs"
        return Invalid("", detail, "unsupported_model_format")
    last = said.decode(errors="replace").strip().splitlines()[-1:]
    log.error("inspection_failed", code=code, last=" ".join(last)[:500])
    return Unavailable("the upload could not be looked at; complete it again")
