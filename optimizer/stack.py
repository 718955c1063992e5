"""The nouns: where (Site), what (Choice), all of it (Stack), and how big (SiteShape).

A site is a place in the network where a precision is chosen; a choice is what it
may get; a stack is a choice for every site.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from optimizer.errors import SpecError

WHOLE_MODEL = -1  # the `layer` of a site that exists once


class Component(StrEnum):
    """What a site does in its layer."""

    EMBEDDINGS = "embeddings"
    ATTN_QKV = "attn_qkv"
    KV_CACHE = "kv_cache"
    ATTN_SCORES = "attn_scores"
    ATTN_SOFTMAX = "attn_softmax"
    ATTN_VALUES = "attn_values"
    ATTN_OUT = "attn_out"
    FFN_IN = "ffn_in"
    FFN_ACT = "ffn_act"
    FFN_OUT = "ffn_out"
    NORMS = "norms"
    ROUTER = "router"
    LM_HEAD = "lm_head"


LINEAR = frozenset(
    {
        Component.ATTN_QKV,
        Component.ATTN_OUT,
        Component.FFN_IN,
        Component.FFN_OUT,
        Component.LM_HEAD,
    }
)


class Granularity(StrEnum):
    """Which elements share a scale.

    Inputs: `tensor` is static (from calibration), `token` dynamic (one scale per
    row, from the row itself), `head` static per attention head. Weights: `tensor`,
    `channel` (one scale per output row), `block` (one per 128×128 block). Both, in
    groups along each row, from the group itself: `group` (128 numbers), `mx` (32
    under a power of two, E8M0), `nv` (16 under an e4m3 number, and one fp32 scale
    for the tensor, which is static for inputs).
    """

    TENSOR = "tensor"
    CHANNEL = "channel"
    TOKEN = "token"
    HEAD = "head"
    BLOCK = "block"
    GROUP = "group"
    MX = "mx"
    NV = "nv"


GROUP_SIZES: Mapping[Granularity, int] = MappingProxyType(
    {
        Granularity.BLOCK: 128,  # as DeepSeek-V3 and vLLM have it
        Granularity.GROUP: 128,
        Granularity.MX: 32,
        Granularity.NV: 16,
    }
)
"""How many neighbors in a row share a scale, where not all of them do."""

WIDE = frozenset({"fp32", "tf32", "bf16", "fp16"})  # formats that carry no scale
ON_REQUEST = frozenset({"fp6_e3m2", "fp4_e2m1", "int8", "int4"})  # formats to come


@dataclass(frozen=True, slots=True, order=True)
class Precision:
    """A format and the granularity of its scales (no meaning where it has none)."""

    format: str
    granularity: Granularity = Granularity.TENSOR


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """What one site gets: both operands, and the format of what it hands on.

    For QKᵀ and PV `input` is Q or P and `weight` is K or V. Elementwise sites
    (softmax, activation, norms) have no `weight`: they read and write `input`'s
    format. Embeddings read nothing but their `weight`. Of the KV cache `input` is K
    and `weight` is V, and `output` is the format that both are stored in.
    """

    name: str
    input: Precision
    weight: Precision | None
    output: str

    @property
    def is_fp8(self) -> bool:
        """Whether any operand has eight bits."""
        formats = [self.input.format, *([self.weight.format] if self.weight else [])]
        return any(f.startswith("fp8") for f in formats)

    @property
    def is_narrow(self) -> bool:
        """Whether any operand has eight bits or fewer."""
        return bool(self._formats - WIDE)

    @property
    def on_request(self) -> bool:
        """Whether it is a candidate only where `search.formats` names its format."""
        return bool(self._formats & ON_REQUEST)

    @property
    def _formats(self) -> frozenset[str]:
        stored = {self.weight.format} if self.weight else set()
        return frozenset({self.input.format} | stored)

    @property
    def weight_only(self) -> bool:
        """Whether the weight alone is narrow."""
        return self.name.endswith("_weight_only")


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """One place in the network where a precision is chosen."""

    layer: int  # WHOLE_MODEL for embeddings, the final norm and lm_head
    component: Component

    def __str__(self) -> str:
        if self.layer == WHOLE_MODEL:
            return str(self.component)
        return f"layers.{self.layer}.{self.component}"

    @classmethod
    def parse(cls, name: str) -> "Site":
        """Inverse of `str(site)`. Raises SpecError naming what it cannot read."""
        try:
            if not name.startswith("layers."):
                return cls(WHOLE_MODEL, Component(name))
            _, layer, component = name.split(".")
            return cls(int(layer), Component(component))
        except ValueError:
            raise SpecError(f"not a site: {name!r}") from None


@dataclass(frozen=True, slots=True)
class SiteShape:
    """What a site moves and multiplies. Elements, not bytes.

    A linear site has `k` inputs and `n` outputs (fused siblings added up; of experts
    only those that one token goes through, so n · k is what it reads);
    `gemms` is how many separate kernels an engine launches for it (1 if fused).
    Attention sites use `heads`, `kv_heads`, `head_dim` and `window` (None: the
    whole context). `elements` is what an elementwise site handles per token.
    """

    site: Site
    n: int = 0
    k: int = 0
    weight_elements: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    window: int | None = None
    elements: int = 0
    parts: tuple[int, ...] = ()  # output rows of each fused sibling
    active_share: float = 1.0  # of `weight_elements`, that one token reads
    kept_fp32: str = ""  # the module in it that the architecture keeps in fp32


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything the cost model reads about a model."""

    architecture: str
    layers: int
    hidden: int
    vocab: int
    max_context: int
    parameters: int
    stored_bytes: int
    tied_embeddings: bool  # embeddings and lm_head are one tensor
    sites: tuple[SiteShape, ...]

    @property
    def every_row(self) -> bool:
        """Whether the head answers at every position: an encoder attends, uncached."""
        return not self._any(Component.KV_CACHE) and self._any(Component.ATTN_SCORES)

    def _any(self, component: Component) -> bool:
        return any(s.site.component is component for s in self.sites)


@dataclass(frozen=True, slots=True)
class Stack:
    """A choice for every site. The optimizer's answer, and the export's input."""

    choices: Mapping[Site, Choice] = field(default_factory=lambda: MappingProxyType({}))

    def to_json(self) -> dict[str, str]:
        """Return {site: choice name}, in the order of the sites."""
        return {str(s): c.name for s, c in sorted(self.choices.items())}

    @classmethod
    def from_json(cls, data: Mapping[str, str]) -> "Stack":
        """Inverse of `to_json`. Raises SpecError naming the site or the choice."""
        sites = {Site.parse(name): choice for name, choice in data.items()}
        return cls({s: choice_named(s.component, c) for s, c in sites.items()})


def _same(fmt: str) -> Choice:
    return Choice(fmt, Precision(fmt), Precision(fmt), fmt)


def _one(fmt: str) -> Choice:
    return Choice(fmt, Precision(fmt), None, fmt)


_TOKEN, _CHANNEL, _HEAD = Granularity.TOKEN, Granularity.CHANNEL, Granularity.HEAD
_BLOCK, _GROUP = Granularity.BLOCK, Granularity.GROUP
_MX, _NV = Granularity.MX, Granularity.NV
_E4M3, _E5M2 = "fp8_e4m3", "fp8_e5m2"

_LINEAR_CHOICES = (
    _same("fp32"),
    _same("bf16"),
    _same("fp16"),
    Choice("fp8_e4m3", Precision(_E4M3), Precision(_E4M3), "bf16"),
    Choice(
        "fp8_e4m3_token", Precision(_E4M3, _TOKEN), Precision(_E4M3, _CHANNEL), "bf16"
    ),
    Choice(
        "fp8_e4m3_block", Precision(_E4M3, _GROUP), Precision(_E4M3, _BLOCK), "bf16"
    ),
    # Hopper's kernels take e5m2 for one operand only: the input has the range.
    Choice("fp8_e5m2", Precision(_E5M2), Precision(_E4M3), "bf16"),
    Choice(
        "fp8_e4m3_weight_only", Precision("bf16"), Precision(_E4M3, _CHANNEL), "bf16"
    ),
    *(
        Choice(f"{f}_{g}", Precision(f, g), Precision(f, g), "bf16")
        for f, g in (("fp6_e3m2", _MX), ("fp4_e2m1", _MX), ("fp4_e2m1", _NV))
    ),
    Choice("int8", Precision("int8", _TOKEN), Precision("int8", _CHANNEL), "bf16"),
    Choice("int4_weight_only", Precision("bf16"), Precision("int4", _GROUP), "bf16"),
)
_SCORES_CHOICES = (
    # The accumulator holds fp32: attention kernels never round the scores themselves.
    *(Choice(f, Precision(f), Precision(f), "fp32") for f in ("fp32", "bf16", "fp16")),
    Choice("fp8_e4m3", Precision(_E4M3), Precision(_E4M3), "fp32"),
    Choice("fp8_e4m3_head", Precision(_E4M3, _HEAD), Precision(_E4M3, _HEAD), "fp32"),
    Choice(
        "fp8_e4m3_token", Precision(_E4M3, _TOKEN), Precision(_E4M3, _TOKEN), "fp32"
    ),
    Choice("fp8_e5m2", Precision(_E5M2), Precision(_E4M3), "fp32"),
)
_VALUES_CHOICES = (
    *(_same(f) for f in ("fp32", "bf16", "fp16")),
    Choice("fp8_e4m3", Precision(_E4M3), Precision(_E4M3), "bf16"),
    Choice("fp8_e4m3_head", Precision(_E4M3), Precision(_E4M3, _HEAD), "bf16"),
    Choice("fp8_e5m2", Precision(_E5M2), Precision(_E4M3), "bf16"),
)
_CACHE_CHOICES = (
    *(_same(f) for f in ("fp32", "bf16", "fp16", _E4M3)),
    Choice("fp8_e4m3_head", Precision(_E4M3, _HEAD), Precision(_E4M3, _HEAD), _E4M3),
    _same(_E5M2),  # stored, never multiplied: both operands may be e5m2
)
_ELEMENTWISE_CHOICES = tuple(_one(f) for f in ("fp32", "bf16", "fp16", _E4M3, _E5M2))
_HIGH_CHOICES = tuple(_one(f) for f in ("fp32", "bf16", "fp16"))
_EMBEDDINGS_CHOICES = (
    *(Choice(f, Precision(f), Precision(f), f) for f in ("fp32", "bf16", "fp16")),
    Choice("fp8_e4m3", Precision("bf16"), Precision(_E4M3, _CHANNEL), "bf16"),
)

CHOICES: Mapping[Component, tuple[Choice, ...]] = MappingProxyType(
    {
        Component.EMBEDDINGS: _EMBEDDINGS_CHOICES,
        Component.ATTN_QKV: _LINEAR_CHOICES,
        Component.KV_CACHE: _CACHE_CHOICES,
        Component.ATTN_SCORES: _SCORES_CHOICES,
        Component.ATTN_SOFTMAX: _ELEMENTWISE_CHOICES,
        Component.ATTN_VALUES: _VALUES_CHOICES,
        Component.ATTN_OUT: _LINEAR_CHOICES,
        Component.FFN_IN: _LINEAR_CHOICES,
        Component.FFN_ACT: _ELEMENTWISE_CHOICES,
        Component.FFN_OUT: _LINEAR_CHOICES,
        Component.NORMS: _HIGH_CHOICES,
        Component.ROUTER: tuple(_same(f) for f in ("fp32", "bf16", "fp16")),
        Component.LM_HEAD: _LINEAR_CHOICES,
    }
)
"""Every choice the product knows, by component; the device and the engine remove some."""


class Role(StrEnum):
    """Where in a site a tensor gets rounded."""

    INPUT = "input"
    WEIGHT = "weight"
    OUTPUT = "output"


def roundings(
    component: Component, choice: Choice
) -> tuple[tuple[Role, Precision], ...]:
    """Return what `choice` rounds at a site of `component`; fp32 rounds nothing."""
    if component is Component.EMBEDDINGS:
        assert choice.weight is not None
        every = [(Role.WEIGHT, choice.weight)]
        if choice.output != choice.weight.format:  # else rounded already
            every.append((Role.OUTPUT, Precision(choice.output)))
    elif choice.weight is None:
        every = [(Role.INPUT, choice.input), (Role.OUTPUT, choice.input)]
    elif component is Component.KV_CACHE:
        every = [(Role.INPUT, choice.input), (Role.WEIGHT, choice.weight)]
    else:
        every = [
            (Role.INPUT, choice.input),
            (Role.WEIGHT, choice.weight),
            (Role.OUTPUT, Precision(choice.output)),
        ]
    return tuple((role, p) for role, p in every if p.format != "fp32")


def choice_named(component: Component, name: str) -> Choice:
    """Return the choice, or raise SpecError listing the names that exist."""
    for choice in CHOICES[component]:
        if choice.name == name:
            return choice
    known = ", ".join(c.name for c in CHOICES[component])
    raise SpecError(f"{component} has no choice {name!r}; it has {known}")
