"""What vLLM's CPU build declares and does not have, filled in with torch.

Its GPU builds round inputs to FP8 under a given scale in CUDA; the CPU build has that
only beside AMX-FP8 units. Elsewhere FP8 layers run weight-only here, as vLLM itself
runs them on AMX: codes in float32, scaled, rounded once. Loading is vLLM's own,
whichever way a layer runs: names, fused siblings, scales, shapes.
"""

from typing import Any

import torch
from vllm import _custom_ops
from vllm.model_executor.kernels.linear.scaled_mm import pytorch as kernels
from vllm.model_executor.layers.fusion import fused_act_quant

LARGEST = torch.finfo(torch.float8_e4m3fn).max
_theirs = _custom_ops.scaled_fp8_quant


def scaled_fp8_quant(
    given: torch.Tensor, scale: torch.Tensor | None = None, *rest: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to the nearest code, as `static_scaled_fp8_quant` does; else theirs.

    Siblings of static scales are put under one scale with it as they are loaded.
    """
    if scale is None or scale.numel() > 1:
        return _theirs(given, scale, *rest, **named)
    codes = (given.float() / scale).clamp(-LARGEST, LARGEST)
    return codes.to(torch.float8_e4m3fn), scale


def weight_only(
    self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x W + b: codes (in, out) in float32, scaled, rounded once."""
    codes, scale = self._get_layer_params(layer)[:2]
    y = (x.float() @ codes.float()) * scale.float().reshape(1, -1)
    return (y if bias is None else y + bias).to(x.dtype)


_custom_ops.scaled_fp8_quant = scaled_fp8_quant
kernels.TorchFP8ScaledMMLinearKernel.apply_weights = weight_only
fused_act_quant._FUSED_ACT_QUANT.clear()  # no activation hands on codes


class Worker:
    """Nothing more: naming it makes vLLM's workers import this file."""
