"""The chosen training precision, in the form of those who train with it.

    training_stack.json          every matrix and its three products, for any reader
    training_arguments.json      transformers.TrainingArguments
    deepspeed.json               DeepSpeed's configuration
    fsdp.json                    torch's FSDP: dtypes of MixedPrecision
    transformer_engine.yaml      TE's debug tooling: products that leave FP8
    transformer_engine_recipe.json   the recipe of TE's autocast
    torchao_float8.py            torchao's filter and configurations

Free of torch. The last three are written where FP8 was chosen.
"""

import json
from collections.abc import Mapping
from typing import Any

from optimizer.training import exports_fp8

Json = dict[str, Any]
OPTIM = {"adam": "adamw_torch", "sgd": "sgd", "sgd_momentum": "sgd"}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "bfloat16"}


def files(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the files of a report, by name. An unstable training has the stack alone."""
    found = {"training_stack.json": _text(training_stack(document))}
    if document["verdict"]["outcome"] == "unstable":
        return found
    found |= {
        "training_arguments.json": _text(training_arguments(document)),
        "deepspeed.json": _text(deepspeed(document)),
        "fsdp.json": _text(fsdp(document)),
    }
    if arithmetic(document) == "fp8":
        found |= exports_fp8.files(document)
    return found


def _text(content: Json) -> str:
    return json.dumps(content, indent=1) + "\n"


def arithmetic(document: Mapping[str, Any]) -> str:
    """Return what the chosen precision multiplies in."""
    chosen = document["verdict"]["chosen"]
    for candidate in document["candidates"]:
        if candidate["name"] == chosen:
            return str(candidate["candidate"]["arithmetic"])
    return "fp32"


def training_stack(document: Mapping[str, Any]) -> Json:
    """Return the stack alone, for machines."""
    return {
        "schema": "precision.training_stack/1",
        "model": {k: document["model"][k] for k in ("name", "sha256")},
        "hardware": document["hardware"]["id"],
        "precision": document["verdict"]["chosen"],
        "outcome": document["verdict"]["outcome"],
        "matrices": document["stack"],
        "kept_fp32": document["kept_fp32"],
        "loss_scaling": document["loss_scaling"],
    }


def training_arguments(document: Mapping[str, Any]) -> Json:
    """Return keyword arguments of transformers' TrainingArguments."""
    how, runs = document["training"], arithmetic(document)
    momentum = (
        {"optim_args": "momentum=0.9"} if how["optimizer"] == "sgd_momentum" else {}
    )
    return {
        "bf16": runs in ("bf16", "fp8"),
        "fp16": runs == "fp16",
        "optim": OPTIM[how["optimizer"]],
        **momentum,
        "learning_rate": how["learning_rate"],
        "weight_decay": how["weight_decay"],
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": how["warmup_steps"],
        "max_grad_norm": how["clip"] or 0.0,  # 0: Trainer does not clip
        "per_device_train_batch_size": how["batch_size"],
        "gradient_accumulation_steps": how["accumulation"],
    }


def deepspeed(document: Mapping[str, Any]) -> Json:
    """Return DeepSpeed's configuration: dtypes, loss scale, batch, clipping."""
    how, runs = document["training"], arithmetic(document)
    scaling = document["loss_scaling"]
    found: Json = {
        "train_micro_batch_size_per_gpu": how["batch_size"],
        "gradient_accumulation_steps": how["accumulation"],
        "gradient_clipping": how["clip"] or 0.0,
        "bf16": {"enabled": runs in ("bf16", "fp8")},
        "fp16": {"enabled": runs == "fp16"},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    if runs == "fp16":
        found["fp16"] |= {
            "loss_scale": 0,  # dynamic
            "initial_scale_power": int(scaling["initial"]).bit_length() - 1,
            "loss_scale_window": scaling["growth_interval"],
            "hysteresis": 1,
            "min_loss_scale": 1,
        }
    return found


def fsdp(document: Mapping[str, Any]) -> Json:
    """Return the dtypes of torch's MixedPrecision, as names, and what keeps fp32.

    Modules that are promoted to fp32 must be wrapped by themselves, without a policy.
    """
    runs = arithmetic(document)
    return {
        "mixed_precision": {
            "param_dtype": DTYPES[runs],
            "reduce_dtype": "float32",
            "buffer_dtype": "float32",
        },
        "keep_fp32": [
            row["matrix"]
            for row in document["stack"]
            if runs != "fp32" and row["fprop"] == "fp32"
        ],
    }
