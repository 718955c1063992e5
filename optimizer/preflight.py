"""Judges what somebody sent, in a process of its own whose limits nothing can pass.

    python -P -m optimizer.preflight model FOLDER
    python -P -m optimizer.preflight dataset FILE KEPT

Prints one JSON object: what was found, or `error` with a code and a reason. Whoever
starts it gives it no secrets: it needs no environment at all.
"""

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # buffers of threads that have nothing to do

MEMORY_BYTES = 1 << 30
HEADERS_CPU_S = 10
BYTES_PER_CPU_S = 10_000_000  # a slow disk's worth; hashing alone does 500 MB
EXTRA_CPU_S = 30

Found = dict[str, Any]


def look_at_model(folder: Path) -> Found:
    """Return what a model folder holds, all its values checked.

    Raises OptimizerError naming the file or the tensor.
    """
    from optimizer import checkpoint  # and with it numpy: once the limits stand

    found = checkpoint.inspect(folder)
    _allow_time(found.stored_bytes)
    checkpoint.check_values(found)
    digests = checkpoint.digests(found)
    return {
        "sha256": checkpoint.fingerprint_of(digests),
        "architecture": found.architecture,
        "parameters": found.parameters,
        "stored_bytes": found.stored_bytes,
        "dtypes": dict(found.dtype_bytes),
        "details": {
            "tensors": len(found.tensors),
            "declared_dtype": found.declared_dtype,
            "files": [_file(folder, *item) for item in sorted(digests.items())],
            "warnings": list(found.warnings),
        },
    }


def look_at_dataset(file: Path, kept: Path) -> Found:
    """Check every line of `file`, and write those that jobs will read to `kept`.

    Raises DatasetError naming the line.
    """
    from optimizer import sampling

    _allow_time(file.stat().st_size)
    found = sampling.keep(file, kept)
    return {"sha256": found.sha256, "samples": found.samples, "bytes": found.bytes}


def limit() -> None:
    """Let this process have so much memory and time, and write no core."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (HEADERS_CPU_S, hard))


def _allow_time(size_bytes: int) -> None:
    """Let reading so many bytes take its time; without limits there is nothing to do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if soft != resource.RLIM_INFINITY:
        more = HEADERS_CPU_S + EXTRA_CPU_S + size_bytes // BYTES_PER_CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (max(soft, more), hard))


def _file(folder: Path, name: str, sha256: str) -> Found:
    return {"path": name, "bytes": (folder / name).stat().st_size, "sha256": sha256}


def main(arguments: list[str]) -> int:
    """Print what was found. 0 also where it is refused: that is an answer."""
    from optimizer.errors import OptimizerError

    kinds: dict[str, Callable[..., Found]] = {
        "model": look_at_model,
        "dataset": look_at_dataset,
    }
    kind, *paths = arguments
    limit()
    try:
        found = kinds[kind](*map(Path, paths))
    except OptimizerError as error:
        found = {"error": {"code": error.code, "detail": str(error)}}
    except MemoryError:
        detail = f"reading it takes more than {MEMORY_BYTES} bytes of memory"
        found = {"error": {"code": f"{kind}_too_large", "detail": detail}}
    print(json.dumps(found))  # noqa: T201  the answer of a program
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
