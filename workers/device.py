"""Which device computes here, as its driver says, without loading what drives it."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache

ANSWER_S = 10.0  # nvidia-smi takes a second or two
MIB = 2**20
SHORT = 8  # digits of a digest: enough for the GPUs of one service


@cache
def identity() -> dict[str, str | None]:
    """Return the driver's version, and a digest of the GPU's own number.

    The digest tells two devices apart, and gives nobody the serial number. None: no
    GPU is here, or nvidia-smi does not answer.
    """
    for driver, uuid in _asked(("driver_version", "uuid"), _visible()[:1]):
        return {"driver": driver, "device_uuid_hash": _digest(uuid)}
    return {"driver": None, "device_uuid_hash": None}


def memory_used() -> dict[str, int]:
    """Return the bytes in use on each GPU that this worker sees, by whomever.

    A GPU is called by its name and the digest that `identity` has, cut short. Empty: no
    GPU is here, or nvidia-smi does not answer.

    Example: {"NVIDIA H200 3f2a9c01": 1_073_741_824}
    """
    rows = _asked(("name", "uuid", "memory.used"), _visible())
    return {
        f"{name} {_digest(uuid)[:SHORT]}": int(used) * MIB
        for name, uuid, used in rows
        if used.isdigit()  # else it says that it cannot know
    }


def program() -> str | None:
    """Return the driver's own tool. None: no GPU is here."""
    return shutil.which("nvidia-smi")


def _digest(uuid: str) -> str:
    return hashlib.sha256(uuid.encode()).hexdigest()


def _visible() -> list[str]:
    said = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [each.strip() for each in said if each.strip()]


def _asked(fields: Sequence[str], ids: Sequence[str]) -> list[list[str]]:
    """Return these fields of each GPU, or of all there are; bytes are in MiB."""
    tool = program()
    if tool is None:
        return []
    chosen = [f"--id={','.join(ids)}"] if ids else []
    query = [f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            [tool, *query, *chosen],
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(",") for line in done.stdout.splitlines()]
    return [[c.strip() for c in row] for row in rows if len(row) == len(fields)]
