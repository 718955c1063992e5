"""The FP8 scales that Transformer Engine's modules keep, read without importing it.

Under delayed scaling a module has `fp8_meta["scaling_fwd"]` and `["scaling_bwd"]`, each
with a `scale` for every tensor: forward three for each product (input, weight, output),
backward two (gradient of the output, gradient of the input). TE multiplies by its scale:
ours is the reciprocal. Other recipes make scales anew for each tensor and keep none.

Read from TE 2.20's source (pytorch/module/base.py, pytorch/quantization.py); never run
on a GPU.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from optimizer.formats import E4M3, E5M2, Format

SIDES = (  # key, tensors of one product, those that are read of them
    ("scaling_fwd", 3, ("input", "weight")),
    ("scaling_bwd", 2, ("gradient",)),
)


def keeps_scales(module: nn.Module) -> bool:
    """Whether it is one of TE's modules; it may have no scales before its first step."""
    return isinstance(getattr(module, "fp8_meta", None), dict)


def reads_its_input(module: nn.Module) -> bool:
    """Whether what goes in is what is multiplied: of a norm in front of it, it is not."""
    return type(module).__name__ == "Linear"


def te_scales(module: nn.Module) -> dict[str, tuple[float, Format]]:
    """Return (scale, format) by tensor: x ≈ q · scale. A second product's are input2, …"""
    meta: Mapping[str, Any] = module.fp8_meta  # type: ignore[assignment]
    return {
        name: (1.0 / te_scale, _format(meta, key))
        for key, each, roles in SIDES
        for name, te_scale in _named(meta.get(key), each, roles)
        if te_scale > 0
    }


def _named(
    state: object, each: int, roles: tuple[str, ...]
) -> Iterator[tuple[str, float]]:
    scale = getattr(state, "scale", None)
    if not isinstance(scale, Tensor):
        return
    for number, value in enumerate(scale.tolist()):
        product, role = divmod(number, each)
        if role < len(roles):
            yield roles[role] + (str(product + 1) if product else ""), value


def _format(meta: Mapping[str, Any], key: str) -> Format:
    """Return e4m3, or e5m2 for the gradients of a hybrid recipe: TE's usual one."""
    recipe = getattr(meta.get("recipe"), "fp8_format", None)
    largest = getattr(getattr(recipe, "value", None), "max_bwd", E5M2.max)
    return E5M2 if key == "scaling_bwd" and largest > E4M3.max else E4M3
