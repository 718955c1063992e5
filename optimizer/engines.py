"""A checkpoint served by a real engine, and its seconds: measured, and named with it.

An engine wants other packages than the product does, so it has a Python of its own,
and runs as a child process. vLLM is the one known here.
"""

import json
import os
import subprocess
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path

from optimizer.errors import HardwareError
from optimizer.local_run import Measured
from optimizer.spec import Workload

LIMIT_S = 1800.0  # of one checkpoint: loading, warming up and a few generations
# Nothing is fetched; a gigabyte of cache holds what one workload needs.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # it starts no process, and needs no socket
    "VLLM_NO_USAGE_STATS": "1",
}


def served_seconds(python: Path, folder: Path, workload: Workload) -> Measured:
    """Serve a checkpoint folder at a workload, and return what it took.

    `python` is that of an environment with vLLM. Raises HardwareError with the engine's
    last words where it is not there or cannot serve the checkpoint.
    """
    script = str(files("optimizer").joinpath("data/vllm_seconds.py"))
    sizes = json.dumps(asdict(workload))
    try:
        done = subprocess.run(
            [str(python), script, str(folder), sizes],
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HardwareError(f"vLLM was not run: {error}") from error
    # The engine logs to the same stream, and as it ends.
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        words = done.stderr.strip().splitlines() or ["it said nothing"]
        raise HardwareError(f"vLLM does not serve {folder.name}: {words[-1]}")
    return Measured(**json.loads(lines[-1]), threads=os.cpu_count() or 1)
