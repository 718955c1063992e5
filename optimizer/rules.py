"""What a device and an engine refuse to run, and why.

What an architecture has a kernel for stands in the catalogue (`support`), looked up
by exact match; the rules that hold for all of them stand here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from optimizer.errors import HardwareError
from optimizer.hardware import Device
from optimizer.stack import (
    CHOICES,
    GROUP_SIZES,
    LINEAR,
    WIDE,
    Choice,
    Component,
    Granularity,
    Precision,
    SiteShape,
)
from optimizer.support import Matmul

FP8_MULTIPLE = 16  # cuBLASLt and `torch._scaled_mm` take K and N in steps of 16
# vLLM's CUTLASS kernel for int8 refuses them as it starts (vllm-project/vllm#54311).
_NO_INT8_IN_VLLM = frozenset({"10.0", "10.3", "12.0"})


def named_format(choice: Choice) -> str:
    """Return the format that a request names to get this choice: its narrow one."""
    own, weight = choice.input.format, choice.weight
    return own if own not in WIDE or weight is None else weight.format


@dataclass(frozen=True, slots=True)
class _Question:
    """May this site of this engine on this device get this choice?"""

    device: Device
    engine: str
    shape: SiteShape
    formats: tuple[str, ...]
    choice: Choice

    @property
    def component(self) -> Component:
        return self.shape.site.component

    @property
    def is_storage(self) -> bool:
        """Whether what is narrow is widened before anything is computed."""
        stored = self.component in (Component.EMBEDDINGS, Component.KV_CACHE)
        return self.choice.weight_only or (stored and self.choice.is_narrow)

    @property
    def is_narrow_linear(self) -> bool:
        narrow = self.choice.is_narrow and not self.is_storage
        return narrow and self.component in LINEAR

    @property
    def is_matrix(self) -> bool:
        return self.component in (*LINEAR, Component.ROUTER)

    @property
    def is_attention(self) -> bool:
        return self.component in (Component.ATTN_SCORES, Component.ATTN_VALUES)

    @property
    def narrow(self) -> str:
        return named_format(self.choice)

    @property
    def operands(self) -> tuple[Precision, ...]:
        weight = self.choice.weight
        return (self.choice.input, *([weight] if weight else []))

    @property
    def granularities(self) -> frozenset[Granularity]:
        return frozenset(p.granularity for p in self.operands)


Rule = Callable[[_Question], str | None]  # the reason for "no", or None


def _searched(q: _Question) -> str | None:
    if q.choice.is_narrow and q.narrow not in q.formats:
        return f"{q.narrow} is not in search.formats"
    return None


def _sixteen_bits(q: _Question) -> str | None:
    fmt = q.choice.input.format
    if fmt not in ("bf16", "fp16") or fmt == q.device.base16:
        return None
    if fmt not in q.device.native:
        return f"{q.device.name} has no {fmt} arithmetic"
    return f"{fmt} is a candidate only where bf16 is missing"


def _kept(q: _Question) -> str | None:
    """16 bits stay where the device cannot multiply in fp32: a site needs a choice."""
    if not q.shape.kept_fp32 or q.choice.name == "fp32":
        return None
    if q.choice.is_narrow or q.device.multiplies("fp32"):
        return f"the architecture keeps {q.shape.kept_fp32} in fp32"
    return None


def _fp32(q: _Question) -> str | None:
    multiplies = q.is_matrix or q.is_attention
    if q.choice.name == "fp32" and multiplies and not q.device.multiplies("fp32"):
        return f"no fp32 matmul rate is known for {q.device.name}"
    return None


def _storage(q: _Question) -> str | None:
    if q.component is Component.KV_CACHE:
        return _cache(q)
    if q.is_storage and q.narrow == "int4" and not q.device.reads_int4_weights:
        return f"no kernel reads int4 weights on {_named(q.device)}"
    if q.is_storage and q.narrow != "int4" and not q.device.reads_fp8_weights:
        return f"no kernel reads FP8 weights on {_named(q.device)}"
    return None


def _cache(q: _Question) -> str | None:
    if not q.choice.is_fp8:
        return None
    if q.choice.output not in q.device.support.stored_cache:
        return f"no kernel reads an FP8 cache on {_named(q.device)}"
    by_head = q.choice.input.granularity is Granularity.HEAD
    if by_head and not q.device.support.cache_scale_per_head:
        return f"no kernel on {q.device.name} scales each head of the cache"
    return None


def _unit(q: _Question) -> str | None:
    if not q.choice.is_narrow or q.is_storage:
        return None
    missing = [p.format for p in q.operands if not q.device.multiplies(p.format)]
    return _no_unit(q.device, missing[0]) if missing else None


def _no_unit(device: Device, fmt: str) -> str:
    kind = "FP8" if fmt.startswith("fp8") else fmt
    if device.is_cpu:
        return f"this processor has no {kind} unit"
    if fmt in device.support.native:
        return f"no {kind} rate is known for {device.name}"
    if kind == "FP8" and device.fp8:
        return f"{device.name} has no {fmt} with the range of OCP's"
    return f"{_named(device)} has no {kind} matmul"


def _named(device: Device) -> str:
    return f"{device.name} ({device.arch})"


def matmul_refusal(device: Device, wanted: Matmul) -> str | None:
    """Say why a device has no kernel for this pair of narrow operands, or None."""
    for fmt in (wanted.input, wanted.weight):
        if not device.multiplies(fmt):
            return _no_unit(device, fmt)
    if wanted.input == wanted.weight == "fp8_e5m2":
        return "cuBLASLt and torch._scaled_mm take e5m2 for one operand at most"
    if device.support.multiplies(wanted):
        return None
    if other := device.support.other_kernels.get(wanted.scaling):
        return other
    said = wanted.scaling.words
    return (
        f"no kernel for {said} of {wanted.input} × {wanted.weight} on {_named(device)}"
    )


def _pair(q: _Question) -> str | None:
    return matmul_refusal(q.device, Matmul.of(q.choice)) if q.is_narrow_linear else None


def _multiples(q: _Question) -> str | None:
    sizes = {"K": q.shape.k, "N": q.shape.n} if q.is_narrow_linear else {}
    if q.is_attention and q.choice.is_fp8:
        sizes = {"head_dim": q.shape.head_dim}
    for name, size in sizes.items():
        if size % FP8_MULTIPLE:
            return f"{name} = {size} is not a multiple of {FP8_MULTIPLE}"
    return None


def _groups(q: _Question) -> str | None:
    """Groups of neighbors that share a scale must be whole."""
    size = max(GROUP_SIZES.get(g, 1) for g in q.granularities)
    if q.shape.k % size:
        return f"K = {q.shape.k} is not a multiple of {size}"
    by_block = Granularity.BLOCK in q.granularities
    if by_block and len(q.shape.parts) > 1 and any(n % size for n in q.shape.parts):
        return f"a block of {size} rows would lie across two fused matrices"
    return None


def _attention_kernel(q: _Question) -> str | None:
    able = q.choice.input.format in q.device.support.attention
    if q.is_attention and q.choice.is_fp8 and not able:
        return f"no FP8 attention kernel for {_named(q.device)}"
    return None


def _output(q: _Question) -> str | None:
    fmt = q.choice.output
    if q.is_narrow_linear and fmt not in q.device.native:
        return (
            f"{q.device.name} has no {fmt} arithmetic, which {q.choice.name} hands on"
        )
    return None


def _vllm(q: _Question) -> str | None:
    if q.device.is_cpu and q.choice.weight_only:
        return "vLLM's CPU build has no kernel for weights alone"
    if q.component is Component.KV_CACHE and q.narrow == "fp8_e5m2":
        return "vLLM refuses an e5m2 cache beside FP8 weights, and gives it no scales"
    if q.component is Component.KV_CACHE:
        return None
    if q.choice.name == "fp32" and q.is_matrix and q.device.base16:
        return "vLLM multiplies in one 16-bit format beside FP8"
    if Granularity.MX in q.granularities:
        return f"no vLLM kernel for dense layers is known to take {q.choice.name}"
    if q.narrow == "int8" and q.device.compute_capability in _NO_INT8_IN_VLLM:
        return f"vLLM's int8 kernels refuse {_named(q.device)}"
    if q.narrow == "fp8_e5m2":
        return "compressed-tensors, which vLLM loads, has no e5m2"
    if q.choice.is_narrow and q.component not in LINEAR:
        return f"vLLM loads no FP8 {q.component} from a checkpoint"
    return None


def _tensorrt_llm(q: _Question) -> str | None:
    """What its PyTorch backend lists: FP8 by tensor, row and block, NVFP4, W4A16."""
    if q.narrow == "fp8_e5m2":
        return "TensorRT-LLM's FP8 is e4m3 only"
    if q.component is Component.KV_CACHE:
        by_head = q.choice.name == "fp8_e4m3_head"
        return "TensorRT-LLM's cache has one scale for a layer" if by_head else None
    if q.choice.is_narrow and q.component not in LINEAR:
        return f"TensorRT-LLM loads no FP8 {q.component} from a checkpoint"
    if q.choice.weight_only and q.narrow != "int4":
        return "TensorRT-LLM has no weight-only FP8"
    if Granularity.MX in q.granularities or q.narrow == "int8":
        return (
            f"TensorRT-LLM's PyTorch backend lists no {q.choice.name} for dense layers"
        )
    return None


def _transformer_engine(q: _Question) -> str | None:
    if not q.choice.is_narrow:
        return None
    if q.component is Component.KV_CACHE:
        return "Transformer Engine keeps its cache in 16 bits"
    if q.is_storage:
        return "Transformer Engine has no weight-only layers"
    if q.component in (Component.ATTN_SOFTMAX, Component.FFN_ACT):
        return f"Transformer Engine has no FP8 {q.component}"
    if q.choice.input.granularity is not Granularity.TENSOR:
        return "Transformer Engine, as used here, scales whole tensors only"
    return None


def _torchao(q: _Question) -> str | None:
    if q.narrow == "fp8_e5m2":
        return "torchao's inference configurations are e4m3 only"
    if q.choice.is_narrow and q.component not in LINEAR:
        return "torchao narrows linear layers only"
    if q.granularities & {Granularity.BLOCK, Granularity.MX, Granularity.NV}:
        return f"torchao has {q.choice.name} in prototypes only"
    return None


_ENGINES: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {
        "any": (),
        "vllm": (_vllm,),
        "tensorrt_llm": (_tensorrt_llm,),
        "transformer_engine": (_transformer_engine,),
        "torchao": (_torchao,),
    }
)
_RULES: tuple[Rule, ...] = (
    _kept,
    _sixteen_bits,
    _fp32,
    _searched,
    _storage,
    _unit,
    _pair,
    _groups,
    _attention_kernel,
    _multiples,
    _output,
)


def refusals(
    device: Device, engine: str, shape: SiteShape, formats: tuple[str, ...]
) -> dict[Choice, str | None]:
    """Say for every choice of the site's component why it is refused; None: allowed.

    fp32 and the device's 16-bit format stay, whatever `formats` says: they are what a
    site falls back to; a matrix in vLLM to 16 bits alone. Raises HardwareError for an
    unknown engine.
    """
    if engine not in _ENGINES:
        raise HardwareError(f"unknown engine {engine!r}; known: {', '.join(_ENGINES)}")
    rules = (*_RULES, *_ENGINES[engine])

    def reason(choice: Choice) -> str | None:
        question = _Question(device, engine, shape, formats, choice)
        return next((no for rule in rules if (no := rule(question))), None)

    return {choice: reason(choice) for choice in CHOICES[shape.site.component]}
