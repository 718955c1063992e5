"""What vLLM's CPU build declares and does not have, in torch: FP8 under a given scale.

Its GPU builds have it in CUDA. Without it no checkpoint with static scales and fused
siblings gets through loading on a processor, and none runs without AMX.
"""

from typing import Any

import torch
from vllm import _custom_ops

_theirs = _custom_ops.scaled_fp8_quant
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def scaled_fp8_quant(
    given: torch.Tensor, scale: torch.Tensor | None = None, *rest: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to the nearest code, as `static_scaled_fp8_quant` does; else theirs."""
    if scale is None or scale.numel() > 1:
        return _theirs(given, scale, *rest, **named)
    codes = (given.float() / scale).clamp(-LARGEST, LARGEST)
    return codes.to(torch.float8_e4m3fn), scale


_custom_ops.scaled_fp8_quant = scaled_fp8_quant


class Worker:
    """Nothing more: naming it makes vLLM's workers import this file."""
