"""What a device is and how it is doing: name, driver, versions, clocks, temperature."""

import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from optimizer.hardware import DEVICES, LOCAL

PACKAGES = ("torch", "transformers", "precision")
ANSWER_S = 10.0  # nvidia-smi takes a second or two
QUERY = ("driver_version", "clocks.sm", "clocks.mem", "temperature.gpu")


def name() -> str:
    """Return what the maker calls the device of this process."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return cpu_name()


def cpu_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name, as the kernel has it."""
    lines = info.read_text().splitlines() if info.exists() else []
    found = (x.partition(":")[2].strip() for x in lines if x.startswith("model name"))
    return next(found, platform.processor() or platform.machine())


def catalogue_id(named: str) -> str:
    """Return the id of the catalogue whose words a name has, the longest; else "local"."""
    words = f" {named.lower().replace('-', ' ')} "
    fitting = [i for i in DEVICES if f" {i.replace('-', ' ')} " in words]
    return max(fitting, key=len, default=LOCAL)


def facts() -> dict[str, Any]:
    """Return what stays the same while a profile is made."""
    return {
        "name": name(),
        "driver": gpu().get("driver_version", ""),
        "threads": torch.get_num_threads(),
        "versions": {p: metadata.version(p) for p in PACKAGES},
    }


def state() -> dict[str, float]:
    """Return clocks in MHz and temperature in °C, as far as the machine tells."""
    told = gpu()
    own = {k: float(told[k]) for k in QUERY[1:] if told.get(k, "").isdigit()}
    clock = psutil.cpu_freq()
    if clock is not None:
        own["cpu_mhz"] = clock.current
    sensors: Any = getattr(psutil, "sensors_temperatures", dict)  # Linux alone has it
    degrees = [s.current for some in sensors().values() for s in some]
    if degrees:
        own["cpu_celsius"] = max(degrees)
    own["load"] = psutil.getloadavg()[0]
    return own


def gpu() -> dict[str, str]:
    """Return what nvidia-smi says of the first GPU; nothing where there is none."""
    found = shutil.which("nvidia-smi")
    if found is None:
        return {}
    query = [f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(
        [found, *query], capture_output=True, text=True, timeout=ANSWER_S, check=False
    )
    values = [v.strip() for v in done.stdout.partition("\n")[0].split(",")]
    return dict(zip(QUERY, values, strict=True)) if done.returncode == 0 else {}
