"""Model folders of which something was changed after they were saved."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

Weights = dict[str, Tensor]
DOWN = "model.layers.1.mlp.down_proj.weight"  # of `tests.service.tiny_model`


def change_weights(folder: Path, change: Callable[[Weights], object]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
