"""Which device computes here, as its driver says, without loading what drives it."""

import hashlib
import os
import shutil
import subprocess
from functools import cache

ANSWER_S = 10.0  # nvidia-smi takes a second or two
QUERY = "--query-gpu=driver_version,uuid"


@cache
def identity() -> dict[str, str | None]:
    """Return the driver's version, and a digest of the GPU's own number.

    The digest tells two devices apart, and gives nobody the serial number. None: no
    GPU is here, or nvidia-smi does not answer.
    """
    driver, uuid = _first_gpu()
    digest = hashlib.sha256(uuid.encode()).hexdigest() if uuid else None
    return {"driver": driver, "device_uuid_hash": digest}


def _first_gpu() -> tuple[str | None, str | None]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    chosen = [f"--id={visible}"] if visible else []
    command = [program, QUERY, "--format=csv,noheader", *chosen]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_S, check=True
        )
        driver, uuid = done.stdout.splitlines()[0].split(",")
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None, None
    return driver.strip(), uuid.strip()
