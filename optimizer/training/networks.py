"""The caller's model as a probe trains it: transformers' own code, in fp32."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimizer.checkpoint import inspect
from optimizer.construct import class_of, construct, models_error, plain_config
from optimizer.errors import ModelError
from optimizer.training.lora import adapt
from optimizer.training.spec import TrainingSpec

ATTENTION = "eager"  # its scores and weights are rounded as the candidate says


def network(folder: Path, task: str, how: TrainingSpec, seed: int) -> nn.Module:
    """Return a model to be trained: fresh for `pretrain`, else with its weights.

    Nothing is dropped out, as models of today are trained. Raises ModelError where the
    folder cannot be loaded, or the model predicts no next token.
    """
    checkpoint = inspect(folder)
    if not checkpoint.architecture.endswith(("ForCausalLM", "LMHeadModel")):
        raise ModelError(
            f"{checkpoint.architecture} predicts masked tokens; a probe trains models "
            "that predict the next one"
        )
    if task != "pretrain":
        made = construct(checkpoint, ATTENTION)
    else:
        cls = class_of(checkpoint)
        config = cls.config_class.from_dict(plain_config(checkpoint))
        config._attn_implementation = ATTENTION
        with models_error(checkpoint), torch.random.fork_rng():
            torch.manual_seed(seed)
            made = cls(config).float().eval()
    settings: Any = made.config
    settings.use_cache = False
    made.requires_grad_(True)
    if task == "lora":
        adapt(made, how.lora_rank, seed)
    return made
