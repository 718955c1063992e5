"""The devices: `data/hardware.json`, checked, and what each of them refuses to run.

Capabilities are looked up by exact architecture, never by "this version or later":
sm_120 is not a superset of sm_100, and CPU kernels accept what no GPU does.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from optimizer.errors import HardwareError
from optimizer.stack import CHOICES, LINEAR, Choice, Component, Granularity, SiteShape

LOCAL = "local"  # the id of the worker's own device, whose figures it has measured

FP8_RATIO = (0.95, 2.05)  # FP8 over bf16 peak: outside, one of them is a sparse figure
FP8_MULTIPLE = 16  # cuBLASLt and `torch._scaled_mm` take K and N in steps of 16

# Ids, then further names, of the rows of the catalogue.
_IDS = {
    "P100 SXM2": ("p100",),
    "V100 SXM2": ("v100", "v100-16gb", "v100-sxm2"),
    "T4": ("t4",),
    "A10": ("a10",),
    "A100 SXM4 40GB": ("a100-40gb", "a100-sxm4-40gb", "a100-sxm-40gb"),
    "A100 SXM4 80GB": ("a100", "a100-80gb", "a100-sxm", "a100-sxm4", "a100-sxm4-80gb"),
    "A100 PCIe 40GB": ("a100-pcie-40gb",),
    "A100 PCIe 80GB": ("a100-pcie", "a100-pcie-80gb"),
    "L4": ("l4",),
    "L40S": ("l40s",),
    "RTX 4090": ("rtx-4090", "rtx4090"),
    "H100 SXM5": ("h100", "h100-sxm", "h100-sxm5", "h100-80gb"),
    "H100 PCIe": ("h100-pcie",),
    "H200 SXM": ("h200", "h200-sxm"),
    "H20": ("h20",),
    "GH200 96GB": ("gh200", "gh200-96gb"),
    "B200 (HGX)": ("b200",),
    "GB200 (per GPU)": ("gb200",),
    "RTX 5090": ("rtx-5090", "rtx5090"),
    "MI300X": ("mi300x",),
    "MI325X": ("mi325x",),
    "Gaudi 2": ("gaudi2", "gaudi-2"),
    "Gaudi 3": ("gaudi3", "gaudi-3"),
    # GH200 144GB has no id: no source read states its bandwidth.
}

# Where a kernel reads FP8 weights and computes in 16 bits (Marlin and its like).
# Gaudi 2 is absent: its e4m3 has another range than the OCP codes on disk.
_FP8_WEIGHTS = frozenset(
    {"8.0", "8.6", "8.9", "9.0", "10.0", "12.0", "gfx942", "Gaudi3 (HL-325L)"}
)
_FP8_ATTENTION = frozenset({"9.0", "10.0"})  # FlashAttention-3; Transformer Engine
# Where a kernel keeps K and V in FP8 and widens them as it reads: FlashInfer's, from
# Ampere on, and AMD's. No unit is needed (vLLM 0.25 docs, issue 4827).
_FP8_CACHE = frozenset({"8.0", "8.6", "8.9", "9.0", "10.0", "12.0", "gfx942"})
_HEAD_CACHE = frozenset({"9.0"})  # scales for each head: FlashAttention-3 alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A data sheet, in SI units; or, with the id "local", what a worker measured."""

    id: str
    name: str
    arch: str = ""
    compute_capability: str | None = None  # None: the vendor numbers nothing
    peak_flops: Mapping[str, float] = field(hash=False)  # dense FLOP/s, by format
    bandwidth_bytes_s: float
    memory_bytes: int
    native: frozenset[str]  # formats that its matrix units multiply
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def base16(self) -> str | None:
        """The 16-bit format of everything that is not narrowed; None: there is none."""
        return next((f for f in ("bf16", "fp16") if f in self.native), None)

    @property
    def fp8(self) -> tuple[str, ...]:
        """The 8-bit encodings that its matrix units take: OCP's, or AMD's fnuz ones."""
        return tuple(sorted(f for f in self.native if f.startswith("fp8")))

    @property
    def is_cpu(self) -> bool:
        """Whether this is a worker without an accelerator."""
        return self.id == LOCAL and self.compute_capability is None

    @property
    def reads_fp8_weights(self) -> bool:
        """Whether 8-bit weights can be stored and widened on the way in."""
        return self.is_cpu or (self.compute_capability or self.arch) in _FP8_WEIGHTS

    @property
    def keeps_fp8_cache(self) -> bool:
        """Whether K and V can be stored in 8 bits and widened on the way in."""
        return (self.compute_capability or self.arch) in _FP8_CACHE

    def multiplies(self, fmt: str) -> bool:
        """Whether the matrix units take `fmt`, in OCP's or in the fnuz encoding."""
        return fmt in self.native or f"{fmt}fnuz" in self.native


def _peaks(row: dict[str, Any]) -> dict[str, float]:
    rates = dict(row["peak_dense_tflops"])
    # RTX 5090: no source states its FP8 rate with FP32 accumulation.
    rates["fp8"] = rates["fp8"] or row.get("derived_estimates", {}).get(
        "fp8_fp32_accumulate"
    )
    kept = ("fp32", "fp16", "bf16", "fp8")
    return {fmt: rates[fmt] * 1e12 for fmt in kept if rates[fmt]}


def _check(device: Device) -> Device:
    """Return the device. Raises HardwareError where its figures contradict each other."""
    peak = device.peak_flops
    low, high = FP8_RATIO
    if "fp8" in peak and not low <= peak["fp8"] / peak["bf16"] <= high:
        raise HardwareError(
            f"catalogue wrong: {device.id} has FP8 at {peak['fp8'] / peak['bf16']:.2f}"
            f" times bf16, outside [{low}, {high}]: a sparse figure?"
        )
    return device


def _device(row: dict[str, Any]) -> Device:
    peak = _peaks(row)
    # A format without a rate cannot be costed (Gaudi 2's fp32), so it is not native.
    native = {
        f
        for f, able in row["native_matmul"].items()
        if able and ("fp8" if f.startswith("fp8") else f) in peak
    }
    estimated = row["peak_dense_tflops"]["fp8"] is None and "fp8" in peak
    return Device(
        id=_IDS[row["device"]][0],
        name=f"{row['vendor']} {row['device']}",
        arch=row["arch"],
        compute_capability=row["compute_capability"],
        peak_flops=MappingProxyType(peak),
        bandwidth_bytes_s=row["memory_bandwidth_gbs"] * 1e9,
        memory_bytes=int(row["memory_gb"] * 1e9),
        native=frozenset(native),
        sources=tuple(row["sources"]),
        notes=(
            *row["notes"],
            *(["the FP8 rate is derived, not stated by a source"] if estimated else []),
        ),
    )


def _variants(row: dict[str, Any]) -> list[Device]:
    base = _device(row)
    sizes: list[int] = [v["memory_gb"] for v in row.get("variants", [])]
    others = [
        replace(
            base,
            id=f"{base.id}-{gb}gb",
            name=f"{base.name} {gb}GB",
            memory_bytes=int(gb * 1e9),
        )
        for gb in sizes
    ]
    return [base, *others]


def _read() -> dict[str, Device]:
    text = files("optimizer").joinpath("data/hardware.json").read_text("utf-8")
    rows = [r for r in json.loads(text)["devices"] if r["device"] in _IDS]
    devices = [_check(d) for row in rows for d in _variants(row)]
    return {d.id: d for d in devices}


DEVICES: Mapping[str, Device] = MappingProxyType(_read())
"""Every device of the catalogue that can be costed, by id."""

_ALIASES = {alias: names[0] for names in _IDS.values() for alias in names}


def device(name: str) -> Device:
    """Return the device with this id or alias (case, `_` and spaces do not matter).

    Raises HardwareError listing the ids; "local" is not in the catalogue, since
    only a worker knows what it runs on.
    """
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    found = DEVICES.get(_ALIASES.get(wanted, wanted))
    if found is None:
        raise HardwareError(f"unknown hardware {name!r}; known: {', '.join(DEVICES)}")
    return found


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
        return self.choice.weight_only or (stored and self.choice.is_fp8)

    @property
    def is_fp8_linear(self) -> bool:
        return self.choice.is_fp8 and not self.is_storage and self.component in LINEAR

    @property
    def is_attention(self) -> bool:
        return self.component in (Component.ATTN_SCORES, Component.ATTN_VALUES)

    @property
    def narrow(self) -> str:
        """The format that gives an FP8 choice its name."""
        own = self.choice.input.format
        weight = self.choice.weight
        return own if own.startswith("fp8") or weight is None else weight.format


Rule = Callable[[_Question], str | None]  # the reason for "no", or None


def _searched(q: _Question) -> str | None:
    if q.choice.is_fp8 and q.narrow not in q.formats:
        return f"{q.narrow} is not in search.formats"
    return None


def _sixteen_bits(q: _Question) -> str | None:
    fmt = q.choice.input.format
    if fmt not in ("bf16", "fp16") or fmt == q.device.base16:
        return None
    if fmt not in q.device.native:
        return f"{q.device.name} has no {fmt} arithmetic"
    return f"{fmt} is a candidate only where bf16 is missing"


def _fp32(q: _Question) -> str | None:
    multiplies = q.component in (*LINEAR, Component.ROUTER) or q.is_attention
    if q.choice.name == "fp32" and multiplies and not q.device.multiplies("fp32"):
        return f"no fp32 matmul rate is known for {q.device.name}"
    return None


def _storage(q: _Question) -> str | None:
    if q.component is Component.KV_CACHE:
        return _cache(q)
    if q.is_storage and not q.device.reads_fp8_weights:
        return f"no kernel reads FP8 weights on {q.device.name} ({q.device.arch})"
    return None


def _cache(q: _Question) -> str | None:
    if not q.choice.is_fp8:
        return None
    if not q.device.keeps_fp8_cache:
        return f"no kernel reads an FP8 cache on {q.device.name} ({q.device.arch})"
    by_head = q.choice.input.granularity is Granularity.HEAD
    if by_head and q.device.compute_capability not in _HEAD_CACHE:
        return f"no kernel on {q.device.name} scales each head of the cache"
    return None


def _fp8_unit(q: _Question) -> str | None:
    if not q.choice.is_fp8 or q.is_storage:
        return None
    operands = [q.choice.input, *([q.choice.weight] if q.choice.weight else [])]
    missing = [p.format for p in operands if not q.device.multiplies(p.format)]
    if not missing:
        return None
    if q.device.is_cpu:
        return "this processor has no FP8 unit"
    if q.device.fp8:
        return f"{q.device.name} has no {missing[0]} with the range of OCP's"
    return f"{q.device.name} ({q.device.arch}) has no FP8 matmul"


def _multiples(q: _Question) -> str | None:
    sizes = {"K": q.shape.k, "N": q.shape.n} if q.is_fp8_linear else {}
    if q.is_attention and q.choice.is_fp8:
        sizes = {"head_dim": q.shape.head_dim}
    for name, size in sizes.items():
        if size % FP8_MULTIPLE:
            return f"{name} = {size} is not a multiple of {FP8_MULTIPLE}"
    return None


def _attention_kernel(q: _Question) -> str | None:
    able = q.device.compute_capability in _FP8_ATTENTION
    if q.is_attention and q.choice.is_fp8 and not able:
        return f"no FP8 attention kernel for {q.device.name} ({q.device.arch})"
    return None


def _vllm(q: _Question) -> str | None:
    if q.component is Component.KV_CACHE and q.narrow == "fp8_e5m2":
        return "vLLM refuses an e5m2 cache beside FP8 weights, and gives it no scales"
    if q.component is Component.KV_CACHE:
        return None
    if q.narrow == "fp8_e5m2":
        return "compressed-tensors, which vLLM loads, has no e5m2"
    if q.choice.is_fp8 and q.component not in LINEAR:
        return f"vLLM loads no FP8 {q.component} from a checkpoint"
    return None


def _transformer_engine(q: _Question) -> str | None:
    if not q.choice.is_fp8:
        return None
    if q.component is Component.KV_CACHE:
        return "Transformer Engine keeps its cache in 16 bits"
    if q.is_storage:
        return "Transformer Engine has no weight-only FP8"
    if q.component in (Component.ATTN_SOFTMAX, Component.FFN_ACT):
        return f"Transformer Engine has no FP8 {q.component}"
    if q.choice.input.granularity is not Granularity.TENSOR:
        return "Transformer Engine scales whole tensors, not tokens or heads"
    return None


def _torchao(q: _Question) -> str | None:
    if q.narrow == "fp8_e5m2":
        return "torchao's inference configurations are e4m3 only"
    if q.choice.is_fp8 and q.component not in LINEAR:
        return "torchao narrows linear layers only"
    return None


_ENGINES: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {
        "any": (),
        "vllm": (_vllm,),
        "transformer_engine": (_transformer_engine,),
        "torchao": (_torchao,),
    }
)
_RULES: tuple[Rule, ...] = (
    _sixteen_bits,
    _fp32,
    _searched,
    _storage,
    _fp8_unit,
    _attention_kernel,
    _multiples,
)


def refusals(
    device: Device, engine: str, shape: SiteShape, formats: tuple[str, ...]
) -> dict[Choice, str | None]:
    """Say for every choice of the site's component why it is refused; None: allowed.

    fp32 and the device's 16-bit format stay, whatever `formats` says: they are what
    a site falls back to. Raises HardwareError for an unknown engine.
    """
    if engine not in _ENGINES:
        raise HardwareError(f"unknown engine {engine!r}; known: {', '.join(_ENGINES)}")
    rules = (*_RULES, *_ENGINES[engine])

    def reason(choice: Choice) -> str | None:
        question = _Question(device, engine, shape, formats, choice)
        return next((no for rule in rules if (no := rule(question))), None)

    return {choice: reason(choice) for choice in CHOICES[shape.site.component]}
