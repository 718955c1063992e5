"""What torchao makes of a written configuration: run where torchao can be imported.

    python torchao_converts.py FILE

Prints, as JSON, the class of each matrix, the casts that are off in the one that runs
partly in FP8, and whether a gradient came through all of them.
"""

import importlib.util
import json
import sys
from types import ModuleType

import torch
from torch import nn

CASTS = ("input", "weight", "grad_output", "input_for_grad_weight")
NAMES = ("model.layers.0.q_proj", "model.layers.0.up_proj", "model.layers.10.up_proj")


def loaded(file: str) -> ModuleType:
    """Return the file as a module, as who trains would import it."""
    spec = importlib.util.spec_from_file_location("torchao_float8", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def network() -> nn.Module:
    """Return a network with matrices of the names that the test's stack has."""
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList(nn.Module() for _ in range(11))
    for name in NAMES:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, nn.Linear(32, 32))
    model.lm_head = nn.Linear(32, 32)
    return model


def main() -> None:
    """Convert the network, and run it forth and back."""
    model = network()
    loaded(sys.argv[1]).convert(model, emulate=True)
    layers = {name: model.get_submodule(name) for name in (*NAMES, "lm_head")}
    up = layers["model.layers.0.up_proj"]
    off = [
        cast
        for cast in CASTS
        if getattr(up.config, f"cast_config_{cast}").scaling_type.name == "DISABLED"
    ]
    x = torch.randn(16, 32, requires_grad=True)
    y = x
    for layer in layers.values():
        y = layer(y)
    y.sum().backward()
    found = {name: type(layer).__name__ for name, layer in layers.items()}
    said = {"classes": found, "off": off, "trained": x.grad is not None}
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
