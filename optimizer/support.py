"""Which kernels an architecture has: `architectures` of `data/hardware.json`.

Looked up by exact match, never by "this version or later": sm_120 is not a superset
of sm_100, and CPU kernels accept what no GPU does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from optimizer.stack import Choice, Granularity


class Scaling(StrEnum):
    """What shares a scale in the two operands of a matmul."""

    TENSOR = "tensor"
    TOKEN_CHANNEL = "token_channel"  # a token of the input, a row of the weight
    BLOCK = "block"  # 128 numbers of the input, 128×128 of the weight
    MX = "mx"  # 32 numbers, under a power of two
    NV = "nv"  # 16 numbers, under an e4m3 number

    @property
    def words(self) -> str:
        """As it reads in a sentence: "no kernel scales …"."""
        return _WORDS[self]


_WORDS = {
    Scaling.TENSOR: "whole tensors",
    Scaling.TOKEN_CHANNEL: "tokens and channels",
    Scaling.BLOCK: "128×128 blocks",
    Scaling.MX: "groups of 32 under a power of two (MX)",
    Scaling.NV: "groups of 16 (NVFP4)",
}
_SCALINGS = {
    (Granularity.TENSOR, Granularity.TENSOR): Scaling.TENSOR,
    (Granularity.TOKEN, Granularity.CHANNEL): Scaling.TOKEN_CHANNEL,
    (Granularity.GROUP, Granularity.BLOCK): Scaling.BLOCK,
    (Granularity.MX, Granularity.MX): Scaling.MX,
    (Granularity.NV, Granularity.NV): Scaling.NV,
}


@dataclass(frozen=True, slots=True, order=True)
class Matmul:
    """A pair of narrow operands, and what shares a scale in them."""

    input: str
    weight: str
    scaling: Scaling

    @classmethod
    def of(cls, choice: Choice) -> "Matmul":
        """Return the matmul that a narrow choice of a linear site asks for."""
        assert choice.weight is not None
        pair = (choice.input.granularity, choice.weight.granularity)
        return cls(choice.input.format, choice.weight.format, _SCALINGS[pair])

    @property
    def fnuz(self) -> "Matmul":
        """The same in AMD's encodings, which CDNA3 multiplies in place of OCP's."""
        return Matmul(f"{self.input}fnuz", f"{self.weight}fnuz", self.scaling)


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What an architecture multiplies, stores narrow, and leaves to other kernels."""

    native: frozenset[str] = frozenset()  # formats that its matrix units multiply
    matmul: frozenset[Matmul] = frozenset()  # narrow pairs that have a kernel
    stored_weights: frozenset[str] = frozenset()  # widened as they are read
    stored_cache: frozenset[str] = frozenset()
    cache_scale_per_head: bool = False
    attention: frozenset[str] = frozenset()  # of QKᵀ and PV in one kernel
    other_kernels: Mapping[Scaling, str] = field(
        default_factory=lambda: MappingProxyType({}), hash=False
    )
    sources: tuple[str, ...] = ()

    def multiplies(self, wanted: Matmul) -> bool:
        """Whether a kernel multiplies this pair, in OCP's or in AMD's encodings."""
        return wanted in self.matmul or wanted.fnuz in self.matmul

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> "Support":
        """Return what a checked row of the catalogue says."""
        others = {Scaling(k): why for k, why in row.get("other_kernels", {}).items()}
        return cls(
            native=frozenset(row["native"]),
            matmul=frozenset(
                Matmul(pair["input"], pair["weight"], Scaling(scaling))
                for pair in row.get("matmul", ())
                for scaling in pair["scalings"]
            ),
            stored_weights=frozenset(row.get("stored_weights", ())),
            stored_cache=frozenset(row.get("stored_cache", ())),
            cache_scale_per_head=row.get("cache_scale_per_head", False),
            attention=frozenset(row.get("attention", ())),
            other_kernels=MappingProxyType(others),
            sources=tuple(row.get("sources", ())),
        )


NONE = Support()
"""Of an architecture that the catalogue does not have: 16 and 32 bits, as measured."""
