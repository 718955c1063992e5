"""A network from a checkpoint: transformers builds it, the files fill it, or it is refused."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import transformers
from torch import nn

from optimizer.checkpoint import Checkpoint, forced_apart
from optimizer.errors import ModelError, OptimizerError
from optimizer.quantize import check_finite
from optimizer.shards import Shards

# What these checkpoints hold beside the model that is measured.
UNUSED: Mapping[str, tuple[str, ...]] = {
    "bert": ("cls.seq_relationship.", "bert.pooler."),
    "roberta": ("roberta.pooler.",),
}
SAVE_AGAIN = "Save the model again with transformers: save_pretrained(folder)"
QUANTIZATION = "quantization_config"


def construct(checkpoint: Checkpoint, attention: str) -> nn.Module:
    """Return the network with all its weights, float32, run by the named attention.

    Raises ModelError where the config cannot be built or the weights do not fill it,
    NonFiniteError for inf or NaN in a weight.
    """
    cls = class_of(checkpoint)
    with models_error(checkpoint):
        network, report = cls.from_pretrained(
            **_source(cls, checkpoint),
            dtype=torch.float32,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, and refused below by name
        )
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        refuse_keys(checkpoint, kind, [str(k) for k in report.get(kind, ())])
    network.eval().requires_grad_(False)
    refuse_forced_apart(network)
    refuse_unusable_weights(network)
    return cast(nn.Module, network)


def class_of(checkpoint: Checkpoint) -> Any:
    """Return transformers' class. `inspect` has held its name against the allow-list."""
    return getattr(transformers, checkpoint.architecture)


@contextmanager
def models_error(checkpoint: Checkpoint) -> Iterator[None]:
    """What a config makes transformers raise is the model's error."""
    try:
        yield
    except (
        MemoryError,
        RuntimeError,
        OptimizerError,
    ):  # this machine's, or said already
        raise
    except Exception as error:  # whatever it may be
        why = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(
            f"{checkpoint.architecture} cannot be built from config.json: {why}. "
            f"{SAVE_AGAIN}"
        ) from error


def plain_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the config of the model that was quantized: its weights are read here."""
    return {k: v for k, v in checkpoint.config.items() if k != QUANTIZATION}


def _source(cls: Any, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return where `from_pretrained` finds the weights: in the folder, if it can.

    transformers would run FP8 weights through kernels that want a GPU. They are read
    here, with their scales, and handed over as ordinary float32 weights.
    """
    if not checkpoint.scales and QUANTIZATION not in checkpoint.config:
        return {"pretrained_model_name_or_path": checkpoint.folder}
    shards = Shards(checkpoint)
    return {
        "pretrained_model_name_or_path": None,
        "config": cls.config_class.from_dict(plain_config(checkpoint)),
        "state_dict": {name: shards.get(name) for name in shards.names()},
    }


def refuse_keys(checkpoint: Checkpoint, kind: str, names: Sequence[str]) -> None:
    """Raise ModelError naming the first of the keys, if there are any that count.

    `kind` is one of transformers' three: missing, mismatched or unexpected keys.
    """
    unused = UNUSED.get(checkpoint.model_type, ())
    counted = [n for n in names if not n.startswith(unused)]
    if counted:
        raise ModelError(
            f"{len(counted)} {kind.replace('_', ' ')} in {checkpoint.folder.name}: "
            f"{min(counted)}. The weights are not those of config.json. {SAVE_AGAIN}"
        )


def refuse_unusable_weights(network: nn.Module) -> None:
    """Raise, naming the parameter, where a weight is missing, inf or NaN."""
    for name, weight in network.named_parameters():
        if weight.is_meta:
            raise ModelError(f"{name} has no data: it is on the meta device")
        check_finite(weight, f"weight {name}")


def refuse_forced_apart(network: nn.Module) -> None:
    """Raise, naming both, where the config ties two weights that are not one tensor."""
    for target, source in tied(network).items():
        if network.get_parameter(target) is not network.get_parameter(source):
            raise forced_apart(target, source)


def tied(network: nn.Module) -> dict[str, str]:
    """Return the parameters that the config ties to another, {target: source}."""
    mapping: Any = network
    return dict(mapping.get_expanded_tied_weights_keys(all_submodels=True))
