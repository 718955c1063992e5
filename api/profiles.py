"""Measured profiles of devices: stored beside the jobs, where every worker finds them."""

import json
from pathlib import Path
from typing import Any

from api import storage
from api.settings import settings
from optimizer import kernels
from optimizer.hardware import LOCAL
from optimizer.kernels import Tables

FOLDER = "profiles"


def path(device_id: str) -> Path:
    """Return where the profile of a device lies. The id is one of the catalogue's."""
    return settings().data_dir / FOLDER / f"{device_id}.json"


def store(profile: dict[str, Any]) -> Path | None:
    """Keep a profile, in place of an earlier one of the same device.

    None: that of a worker's own processor, which no job uses, is not kept. Raises
    HardwareError where a profile cannot be read back.
    """
    kernels.from_profile(profile)
    if profile["device"] == LOCAL:
        return None
    target = path(profile["device"])
    storage.write(target, json.dumps(profile, indent=1, allow_nan=False).encode())
    return target


def tables(device_id: str) -> Tables | None:
    """Return what was measured on a device; None: nothing was.

    Raises HardwareError where the file is not a profile.
    """
    try:
        text = path(device_id).read_text()
    except OSError:
        return None
    return kernels.from_profile(json.loads(text))
