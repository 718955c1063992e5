"""A stack as a torchao configuration: what `quantize_` and transformers' loader read.

Every matrix is named in full; what is not named stays as it is. Activations are scaled
as they come, also where the stack was measured with a static scale: torchao calibrates
those itself, in a step of its own.
"""

from typing import Any

from optimizer.errors import ExportError
from optimizer.export_files import Target
from optimizer.export_scheme import CONV1D, Deviation, Toward
from optimizer.model import LoadedModel
from optimizer.stack import LINEAR, Choice, Precision, Site, Stack, choice_named

CONFIGURATION = "torchao.json"
_ROW = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
_TENSOR = {"_type": "PerTensor", "_version": 1, "_data": {}}
_E4M3 = {"_type": "torch.dtype", "_data": "float8_e4m3fn"}


def _dynamic(granularity: dict[str, Any]) -> dict[str, Any]:
    data = {
        "activation_dtype": _E4M3,
        "weight_dtype": _E4M3,
        "granularity": [granularity, granularity],
    }
    return _config("Float8DynamicActivationFloat8WeightConfig", data)


def _config(name: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return what `torchao.core.config.config_from_dict` reads."""
    return {"_type": name, "_version": 2, "_data": data}


CONFIGURATIONS = {
    "fp8_e4m3": _dynamic(_TENSOR),
    "fp8_e4m3_token": _dynamic(_ROW),
    "fp8_e4m3_weight_only": _config(
        "Float8WeightOnlyConfig", {"weight_dtype": _E4M3, "granularity": _ROW}
    ),
}


def configuration(
    stack: Stack, model: LoadedModel
) -> tuple[dict[str, Any], tuple[Deviation, ...]]:
    """Return the configuration, and where it is not what was measured.

    Raises ExportError where torchao would do nothing, or cannot.
    """
    if model.architecture in CONV1D:
        raise ExportError(
            f"torchao narrows Linear modules, and {model.architecture} has Conv1D"
        )
    named: dict[str, Any] = {}
    found: list[Deviation] = []
    for site, choice in sorted(stack.choices.items()):
        why = _refusal(site, choice, model)
        if why is not None:
            wide = choice_named(site.component, "bf16").name
            found.append(Deviation(str(site), choice.name, wide, Toward.WIDER, why))
        elif choice.is_narrow:
            found += _dynamic_instead(site, choice)
            config = CONFIGURATIONS[choice.name]
            named |= {part.name: config for part in model.parts[site]}
    if not named:
        raise ExportError("no matrix of the stack is in an FP8 that torchao has")
    whole = {"_type": "FqnToConfig", "_version": 1, "_data": {"fqn_to_config": named}}
    return whole, tuple(found)


def write_configuration(whole: dict[str, Any], to: Target) -> None:
    """Write it as transformers' `quantization_config` has it."""
    to.json(
        CONFIGURATION, {"quant_method": "torchao", "quant_type": {"default": whole}}
    )


def _refusal(site: Site, choice: Choice, model: LoadedModel) -> str | None:
    if not choice.is_narrow:
        return None
    if site.component not in LINEAR:
        return "torchao narrows matrices only"
    if choice.name not in CONFIGURATIONS:
        return f"torchao has no configuration for {choice.name}"
    if any(part.index is not None for part in model.parts[site]):
        return "torchao narrows Linear modules, and experts are tensors of one module"
    return None


def _dynamic_instead(site: Site, choice: Choice) -> list[Deviation]:
    if choice.input != Precision("fp8_e4m3"):
        return []
    why = "the input's scale is from the input itself, not from calibration"
    return [Deviation(str(site), choice.name, "fp8_e4m3, dynamic", Toward.WIDER, why)]
