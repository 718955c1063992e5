"""An FP8 training stack for Transformer Engine and for torchao.

Both run every matrix in FP8 unless told otherwise; what is written is which matrices,
and which of their products, leave it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from optimizer.training.candidates import HISTORY

GEMMS = ("fprop", "dgrad", "wgrad")
Row = Mapping[str, Any]


def files(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the files of a report whose chosen precision is FP8."""
    rows = document["stack"]
    delayed = document["verdict"]["chosen"] == "fp8_delayed"
    found = {
        "transformer_engine_recipe.json": json.dumps(recipe(delayed), indent=1) + "\n",
        "torchao_float8.py": torchao(rows),
    }
    if leaving(rows):  # its reader refuses a file without a section
        found["transformer_engine.yaml"] = debug_yaml(rows)
    return found


def leaving(rows: Sequence[Row]) -> dict[tuple[str, ...], list[str]]:
    """Return the matrices that leave FP8, by the products with which they do."""
    found: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        gemms = tuple(gemm for gemm in GEMMS if row[gemm] != "fp8")
        if gemms:
            found.setdefault(gemms, []).append(row["matrix"])
    return found


def recipe(delayed: bool) -> dict[str, Any]:
    """Return the name of TE's recipe class, and its arguments."""
    if not delayed:
        return {"recipe": "Float8CurrentScaling", "arguments": {"fp8_format": "HYBRID"}}
    arguments = {"fp8_format": "HYBRID", "amax_history_len": HISTORY}
    return {
        "recipe": "DelayedScaling",
        "arguments": {**arguments, "amax_compute_algo": "max", "margin": 0},
    }


def debug_yaml(rows: Sequence[Row]) -> str:
    """Return the configuration of TE's debug features: a section for each set of products.

    Layers are matched by the end of their names, as `infer_and_assign_layer_names`, or
    `name=`, gives them.
    """
    said = [
        "# Transformer Engine: nvdlfw_inspect.api.initialize(config_file=this file, ...)",
        "# Products listed here run in 16 bits, all others in FP8.",
    ]
    for gemms, names in leaving(rows).items():
        said += [
            f"keep_16_bits_{'_'.join(gemms)}:",
            "  enabled: true",
            "  layers:",
            f"    layer_name_regex_pattern: {json.dumps(_pattern(names))}",
            "  transformer_engine:",
            "    DisableQuantizationGEMM:",
            "      enabled: true",
            f"      gemms: [{', '.join(gemms)}]",
        ]
    return "\n".join(said) + "\n"


def _pattern(names: Sequence[str]) -> str:
    """Return a pattern that matches these names, whatever stands before them."""
    return f"(^|.*\\.)({'|'.join(re.escape(name) for name in names)})$"


_TORCHAO = '''"""torchao's float8 training, as a probe found it safe: current scales, by tensor.

    from torchao_float8 import convert
    convert(model)

A matrix that leaves FP8 with one product alone does so with a configuration of its own;
one that leaves it with all three is not converted.
"""

from torch import float8_e4m3fn, float8_e5m2, nn
from torchao.float8 import (
    CastConfig,
    Float8LinearConfig,
    ScalingType,
    convert_to_float8_training,
)

# Matrices that leave FP8, by the products with which they do.
LEAVING: dict[tuple[str, ...], frozenset[str]] = {leaving}
NARROW: frozenset[str] = frozenset({narrow})


def module_filter_fn(module: nn.Module, fqn: str) -> bool:
    """Whether all three products of a matrix run in FP8."""
    return fqn in NARROW


def convert(model: nn.Module, emulate: bool = False) -> nn.Module:
    """Convert the matrices of a model, each as it was found safe."""
    plain = Float8LinearConfig(emulate=emulate)
    convert_to_float8_training(model, config=plain, module_filter_fn=module_filter_fn)
    for gemms, names in LEAVING.items():
        if len(gemms) < 3:
            convert_to_float8_training(
                model,
                config=_config(gemms, emulate),
                module_filter_fn=lambda module, fqn, names=names: fqn in names,
            )
    return model


# The operands of each product: torchao's name, and the dtype.
OPERANDS = {
    "fprop": {"input": float8_e4m3fn, "weight": float8_e4m3fn},
    "dgrad": {"grad_output": float8_e5m2, "weight_for_grad_input": float8_e4m3fn},
    "wgrad": {
        "input_for_grad_weight": float8_e4m3fn,
        "grad_output_for_grad_weight": float8_e5m2,
    },
}


def _config(gemms: tuple[str, ...], emulate: bool) -> Float8LinearConfig:
    """Leave the operands of these products as they are."""
    fields = {
        f"cast_config_{name}": CastConfig(
            scaling_type=ScalingType.DISABLED if gemm in gemms else ScalingType.DYNAMIC,
            target_dtype=dtype,
        )
        for gemm, operands in OPERANDS.items()
        for name, dtype in operands.items()
    }
    return Float8LinearConfig(emulate=emulate, **fields)
'''


def torchao(rows: Sequence[Row]) -> str:
    """Return a Python module that converts a model with torchao."""
    left = leaving(rows)
    listed = {gemms: sorted(names) for gemms, names in left.items()}
    inside = "".join(
        f"    {gemms!r}: frozenset({json.dumps(names)}),\n"
        for gemms, names in listed.items()
    )
    narrow = [row["matrix"] for row in rows if all(row[g] == "fp8" for g in GEMMS)]
    body = f"{{\n{inside}}}" if inside else "{}"
    text = _TORCHAO.replace("{leaving}", body)
    return text.replace("{narrow}", json.dumps(narrow, indent=4))
