"""Where the runs of a probe compute, and what is emulated there."""

from typing import Any

import torch

from optimizer import on_device


def executed_on() -> dict[str, Any]:
    """Return the device that trains here, and the arithmetic that it has no units for."""
    here = on_device.executed_on()
    return {
        "device": here["device"],
        "threads": torch.get_num_threads(),
        "emulated": ["fp8"] if here["emulated"] else [],
    }


def said() -> str:
    """Say what the runs' products are."""
    if executed_on()["emulated"]:
        return (
            "FP8 products are emulated: codes multiplied exactly, summed in fp32, rounded "
            "once to bf16. bf16 and fp16 are torch's own autocast on this device."
        )
    return (
        "FP8 products ran on the device's own units (torch._scaled_mm), bf16 and fp16 "
        "under torch's own autocast there."
    )
