"""What vLLM's own code makes of quantization_configs: run by vLLM's own Python.

    python reads_config.py ASKED.json OUT.json

ASKED has `configs` by name, `modules` that are asked for in each, and the two `shapes`
of a matrix, as it is stored and as config.json says. OUT has for each configuration the
strategies (of weights, of inputs) of every module, what is said to a cache in e5m2, and
what is said to the shape; a refusal is its text. No engine is started.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.attention.attention import (
    Attention,
    _init_kv_cache_quant,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.llama import LlamaForCausalLM


def main() -> None:
    """Read every configuration."""
    asked = json.loads(Path(sys.argv[1]).read_text())
    found = {
        name: {
            "schemes": tried(schemes, config, asked["modules"]),
            "e5m2": tried(e5m2_cache, config),
        }
        for name, config in asked["configs"].items()
    }
    stored, built = (torch.empty(shape) for shape in asked["shapes"])
    shape = tried(default_weight_loader, torch.nn.Parameter(built), stored)
    Path(sys.argv[2]).write_text(json.dumps({"configs": found, "shape": shape}))


def tried(ask: Callable[..., Any], *of: Any) -> Any:
    """Return an answer, or the text of a refusal."""
    try:
        return ask(*of)
    except (ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"


def read(config: dict[str, Any]) -> CompressedTensorsConfig:
    """Return vLLM's reading of a configuration, as its loader makes it."""
    made = CompressedTensorsConfig.from_config(json.loads(json.dumps(config)))
    made.packed_modules_mapping = LlamaForCausalLM.packed_modules_mapping
    return made


def schemes(config: dict[str, Any], modules: list[str]) -> dict[str, Any]:
    """Return the strategies of each module; null: it stays in 16 bits."""
    made, layer = read(config), torch.nn.Linear(1, 1)
    found = {name: made.get_scheme_dict(layer, name) for name in modules}
    return {
        name: one and [one[part] and str(one[part].strategy) for part in PARTS]
        for name, one in found.items()
    }


PARTS = ("weights", "input_activations")


def e5m2_cache(config: dict[str, Any]) -> str:
    """Say what becomes of an attention layer whose cache is asked for in e5m2."""
    layer = Attention.__new__(Attention)
    torch.nn.Module.__init__(layer)
    layer.kv_cache_dtype = "fp8_e5m2"
    _init_kv_cache_quant(layer, read(config), "model.layers.0.self_attn.attn")
    return "taken"


if __name__ == "__main__":
    main()
