"""The stacks, shapes and devices that tests.bench.latency compares."""

from optimizer.architectures import PUBLISHED
from optimizer.configs import shape_of
from optimizer.stack import (
    LINEAR,
    Choice,
    Component,
    ModelShape,
    Site,
    Stack,
    choice_named,
)

SYSTEMS = {
    "a100": "a100_sxm",
    "l40s": "l40s",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "gb200": "gb200",
    "b300": "b300_sxm",
    "gb300": "gb300",
    "rtx-pro-6000": "rtx_pro_6000_server",
}
# What the formats of a table are here: of the layers' matrices, and of the cache.
STACKS = {
    "bf16": ("bf16", "bf16"),
    "fp16": ("fp16", "fp16"),
    "fp8": ("fp8_e4m3", "fp8_e4m3"),  # static scales, as TensorRT-LLM's engines
    "weight_only": ("fp8_e4m3_weight_only", "bf16"),
    "peer fp8": ("fp8_e4m3_token", "bf16"),
}


def uniform(shape: ModelShape, formats: str) -> Stack:
    """One choice for all matrices of the layers, and 16 bits for what is left."""
    matrices, cache = STACKS[formats]
    rest = "fp16" if formats == "fp16" else "bf16"

    def choice(site: Site) -> Choice:
        if site.component is Component.KV_CACHE:
            return choice_named(site.component, cache)
        narrow = site.component in LINEAR and site.component is not Component.LM_HEAD
        return choice_named(site.component, matrices if narrow else rest)

    return Stack({s.site: choice(s.site) for s in shape.sites})


def shape(model: str) -> ModelShape:
    """Return a published shape; that of Llama 2 70B is 3.1's with its vocabulary."""
    if model == "llama-2-70b":
        return shape_of({**PUBLISHED["llama-3.1-70b"].config, "vocab_size": 32000})
    return PUBLISHED[model].shape
