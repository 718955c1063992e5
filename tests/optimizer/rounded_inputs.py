"""Inputs of products as a checkpoint's groups say, rounded by compressed-tensors' own code."""

import json
from pathlib import Path
from typing import Any, cast

import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class RoundedInputs(TorchFunctionMode):
    """Products whose inputs compressed-tensors rounds as a checkpoint's groups say.

    It has no module for Conv1D and for experts in one tensor: there this stands in the
    place of its modules, and finds a product by the memory of its weights.
    """

    def __init__(self, network: Any, checkpoint: Path) -> None:
        super().__init__()
        network.config._experts_implementation = "eager"  # a product for each
        self._how: dict[int, tuple[Any, Tensor | None]] = {}
        config = json.loads((checkpoint / "config.json").read_text())
        parsed = QuantizationConfig.model_validate(config["quantization_config"])
        stored = load_file(checkpoint / "model.safetensors")
        for group in parsed.config_groups.values():
            for name in group.targets if group.input_activations else ():
                weight = _weight_of(network, name)
                how = group.input_activations, stored.get(f"{name}.input_scale")
                self._how[weight.untyped_storage().data_ptr()] = how

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        at = {functional.linear: 0, torch.addmm: 1}.get(func)
        if at is not None:
            how = self._how.get(args[at + 1].untyped_storage().data_ptr())
            if how is not None:
                args = (*args[:at], self._round(args[at], *how), *args[at + 1 :])
        return func(*args, **(kwargs or {}))

    def _round(self, x: Tensor, how: Any, scale: Tensor | None) -> Tensor:
        if scale is None:
            by_token = x.unsqueeze(0) if x.dim() == 2 else x  # (1, tokens, inputs)
            scale, zero = compute_dynamic_scales_and_zp(by_token, how, nn.Module())
            return fake_quantize(by_token, scale, zero, how).reshape(x.shape)
        return fake_quantize(x, scale, torch.zeros_like(scale), how)


def _weight_of(network: Any, name: str) -> Tensor:
    """Return what holds a matrix that a checkpoint names."""
    before, experts, expert = name.partition(".block_sparse_moe.experts.")
    if not experts:
        return cast(Tensor, network.get_submodule(name).weight)
    held = network.get_submodule(f"{before}.mlp.experts")
    down = expert.endswith("w2")
    return cast(Tensor, held.down_proj if down else held.gate_up_proj)
