"""What of a stack vLLM loads from a compressed-tensors checkpoint, and what becomes of the rest.

Matrices carry the stack: their weights are stored as they were measured, or the export
is refused with the reason. What no checkpoint can say of the other sites is served in
the 16-bit format beside them, and every such site is listed:

    matrix in FP8            as it is; e5m2 inputs are served in 16 bits (`wider`)
    matrix in fp32           refused: vLLM runs one format beside FP8
    matrix in other formats  refused: there is no writer for them
    FP8 cache, one choice    as it is, with k and v scales; else 16 bits (`wider`)
    FP8 embeddings, softmax, activations, attention products    16 bits (`wider`)
    fp32 there, and norms    fp32 inside the kernel, 16 bits between them (`narrower`)

What the stack then is (`served`) can be run like any other: that is how the export is
measured.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from optimizer.errors import ExportError
from optimizer.padding import padding
from optimizer.stack import (
    LINEAR,
    WHOLE_MODEL,
    WIDE,
    Choice,
    Component,
    Granularity,
    ModelShape,
    Precision,
    Site,
    SiteShape,
    Stack,
    choice_named,
)

# vLLM's own classes. Others run there through transformers, unmeasured with FP8.
SERVED = frozenset(
    {
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "MistralForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Phi3ForCausalLM",
        "GPT2LMHeadModel",
        "FalconForCausalLM",
        "MixtralForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
CONV1D = frozenset({"GPT2LMHeadModel"})  # matrices that are no Linear, (in, out)
TIED_IN_CODE = frozenset(
    {"Gemma2ForCausalLM"}
)  # vLLM asserts it, or never reads a head
MATRICES = LINEAR | {Component.ROUTER}
_E4M3 = "fp8_e4m3"


class Toward(StrEnum):
    """Whether an exported site holds more of its numbers than the measured one."""

    WIDER = "wider"
    NARROWER = "narrower"


@dataclass(frozen=True, slots=True)
class Scheme:
    """How compressed-tensors has the matrices of a site, in its own words."""

    weights: str  # tensor, channel, block
    inputs: str | None  # tensor is static; token and group dynamic; None: 16 bits

    @property
    def layout(self) -> str:
        """The name of the format: only one of them may come without input scales."""
        return "naive-quantized" if self.inputs is None else "float-quantized"


@dataclass(frozen=True, slots=True)
class Deviation:
    """A site that the engine runs in another precision than the measured one."""

    site: str
    measured: str
    served: str
    toward: Toward
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What is written for every site, and what an engine makes of it."""

    served: Stack
    schemes: Mapping[Site, Scheme]  # of the matrices in FP8
    cache: Granularity | None  # of the scales of an FP8 cache; None: 16 bits
    base: str  # the 16-bit format of everything else
    untied: bool  # the head gets a tensor of its own, for it alone is FP8
    deviations: tuple[Deviation, ...]

    def to_json(self) -> dict[str, Any]:
        """Return what the export's manifest says of it."""
        return {
            "served": self.served.to_json(),
            "base": self.base,
            "untied_head": self.untied,
            "deviations": [asdict(d) for d in self.deviations],
        }


SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        "fp8_e4m3": Scheme("tensor", "tensor"),
        "fp8_e4m3_token": Scheme("channel", "token"),
        "fp8_e4m3_block": Scheme("block", "group"),
        "fp8_e4m3_weight_only": Scheme("channel", None),
        "fp8_e5m2": Scheme("tensor", None),  # the weights are e4m3
    }
)
"""The matrices that compressed-tensors has a scheme for, by the name of their choice."""


def plan(stack: Stack, shape: ModelShape) -> Plan:
    """Decide what is written. Raises ExportError naming site, choice and reason."""
    if shape.architecture not in SERVED:
        raise ExportError(
            f"vLLM has no {shape.architecture} of its own; it has "
            f"{', '.join(sorted(SERVED))}"
        )
    base = _base(stack)
    shapes = {s.site: s for s in shape.sites}
    cache = _cache(stack)
    served: dict[Site, Choice] = {}
    found: list[Deviation] = []
    for site, choice in sorted(stack.choices.items()):
        _refuse(shapes[site], choice, shape)
        served[site], reason, toward = _served(site, choice, base, cache)
        if reason:
            found.append(
                Deviation(str(site), choice.name, served[site].name, toward, reason)
            )
    schemes = {
        site: SCHEMES[choice.name]
        for site, choice in sorted(stack.choices.items())
        if site.component in LINEAR and choice.is_narrow
    }
    _refuse_unlike_experts(shape, schemes)
    head = Site(WHOLE_MODEL, Component.LM_HEAD)
    untied = head in schemes and shape.tied_embeddings
    return Plan(
        Stack(MappingProxyType(served)),
        MappingProxyType(schemes),
        cache,
        base,
        untied,
        tuple(found),
    )


def _base(stack: Stack) -> str:
    """Return the stack's 16-bit format; bf16 where no site says."""
    named = {c.input.format for c in stack.choices.values()} | {
        c.output for c in stack.choices.values()
    }
    if {"bf16", "fp16"} <= named:
        raise ExportError("the stack has bf16 and fp16 sites: vLLM runs one of them")
    return "fp16" if "fp16" in named else "bf16"


def refusal(shape: SiteShape, choice: Choice, model: ModelShape) -> str | None:
    """Say why a matrix cannot be stored as it was measured; None: it can, or is none."""
    if shape.site.component not in MATRICES:
        return None
    return next(_refusals(shape, choice, model), None)


def _refuse(shape: SiteShape, choice: Choice, model: ModelShape) -> None:
    why = refusal(shape, choice, model)
    if why is not None:
        raise ExportError(
            f"{shape.site} is {choice.name}, and a checkpoint for vLLM cannot have "
            f"that: {why}"
        )


def _refusals(shape: SiteShape, choice: Choice, model: ModelShape) -> Iterator[str]:
    if choice.name == "fp32":
        yield "vLLM runs every other site in 16 bits; choose bf16 there"
    if not choice.is_narrow:
        return
    if choice.name not in SCHEMES:
        yield f"only {', '.join(SCHEMES)} are written"
        return
    if to := padding(shape, choice):
        yield (
            f"it was measured padded from {to.n}×{to.k} to {to.padded_n}×{to.padded_k}, "
            "and vLLM builds its layers from config.json"
        )
    if model.architecture in CONV1D and SCHEMES[choice.name].weights == "block":
        yield "its matrices are stored (in, out), which blocks of scales do not follow"
    if shape.active_share < 1 and SCHEMES[choice.name].inputs is None:
        yield "its experts have no weight-only FP8 kernel"
    at_head = shape.site.component is Component.LM_HEAD
    if at_head and model.tied_embeddings and model.architecture in TIED_IN_CODE:
        yield f"its {model.architecture} always takes the embeddings for the head"
    if at_head and SCHEMES[choice.name].weights == "block":
        yield "it pads the vocabulary, which blocks of scales do not follow"


def _refuse_unlike_experts(model: ModelShape, schemes: Mapping[Site, Scheme]) -> None:
    """vLLM runs gate, up and down of a layer's experts as one, under one scheme."""
    for shape in model.sites:
        if shape.site.component is not Component.FFN_IN or shape.active_share == 1:
            continue
        down = Site(shape.site.layer, Component.FFN_OUT)
        one, other = schemes.get(shape.site), schemes.get(down)
        if one != other:
            raise ExportError(
                f"{shape.site} and {down} are not alike: vLLM runs all matrices of a "
                "layer's experts under one scheme"
            )


def _cache(stack: Stack) -> Granularity | None:
    """Return the scales of the cache, if all layers have one FP8 choice that loads."""
    every = {c for s, c in stack.choices.items() if s.component is Component.KV_CACHE}
    if len(every) != 1:
        return None
    (choice,) = every
    return choice.input.granularity if choice.output == _E4M3 else None


def _served(
    site: Site, choice: Choice, base: str, cache: Granularity | None
) -> tuple[Choice, str, Toward]:
    """Return what the engine runs, and why that is another choice ("": it is not)."""
    component = site.component
    if component in LINEAR and choice.input.format == "fp8_e5m2":
        return _weights_alone(choice, base), "there is no e5m2 input", Toward.WIDER
    if component in MATRICES or choice.name == base:
        return choice, "", Toward.WIDER
    if component is Component.KV_CACHE and cache is not None:
        return choice, "", Toward.WIDER
    wide = choice_named(component, base)
    if choice.name == "fp32":
        return wide, _HANDED_ON.get(component, _WITHIN), Toward.NARROWER
    if choice.name in WIDE:
        return wide, f"vLLM runs the model in {base}", Toward.WIDER
    return wide, _WIDER_REASONS.get(component, _NO_KERNEL), Toward.WIDER


def _weights_alone(choice: Choice, base: str) -> Choice:
    assert choice.weight is not None
    return Choice("fp8_e4m3_tensor_weight_only", Precision(base), choice.weight, base)


_NO_KERNEL = "no checkpoint puts it in FP8: vLLM's kernels run it in 16 bits"
_WITHIN = "vLLM's kernel is fp32 inside, and reads and hands on 16 bits"
_HANDED_ON = {
    Component.EMBEDDINGS: "vLLM holds the table in 16 bits",
    Component.KV_CACHE: "vLLM's cache has 16 bits",
}
_WIDER_REASONS = {
    Component.EMBEDDINGS: "vLLM looks up no FP8 table: it stays as the model has it",
    Component.KV_CACHE: "vLLM has one switch for all layers, and no e5m2 beside FP8 "
    "weights: the cache stays in 16 bits",
}
