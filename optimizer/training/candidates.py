"""The precisions that a probe trains in: as data, without torch.

A candidate names the arithmetic of the matrices, whether an fp32 master copy of the
weights takes the updates, and how the loss is scaled. Promotions are part of it: a
product of one matrix that runs in something wider.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from optimizer.advice import LossScaling
from optimizer.errors import SpecError
from optimizer.formats import BF16, E4M3, E5M2, FP16, FP32, Format
from optimizer.hardware import Device


class Arithmetic(StrEnum):
    """What a product of two matrices is computed in."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"  # e4m3 forward, e5m2 for gradients; the rest of the model in bf16


class Gemm(StrEnum):
    """The three products that a matrix takes part in."""

    FPROP = "fprop"  # y = x Wᵀ
    DGRAD = "dgrad"  # gradient of x = g W
    WGRAD = "wgrad"  # gradient of W = gᵀ x


class Scaling(StrEnum):
    """When the scale of an FP8 tensor is made."""

    CURRENT = "current"  # from the tensor itself
    DELAYED = "delayed"  # from the largest values of earlier steps


HISTORY = 1024  # steps that a delayed scale remembers; Transformer Engine's default
WIDER: Mapping[Arithmetic, Arithmetic] = MappingProxyType(
    {
        Arithmetic.FP8: Arithmetic.BF16,
        Arithmetic.BF16: Arithmetic.FP32,
        Arithmetic.FP16: Arithmetic.FP32,
    }
)
"""What a promoted product runs in."""

OPERANDS: Mapping[Gemm, tuple[str, str]] = MappingProxyType(
    {
        Gemm.FPROP: ("input", "weight"),
        Gemm.DGRAD: ("gradient", "weight"),
        Gemm.WGRAD: ("gradient", "input"),
    }
)
RESULTS: Mapping[Gemm, str] = MappingProxyType(
    {
        Gemm.FPROP: "output",
        Gemm.DGRAD: "input_gradient",
        Gemm.WGRAD: "weight_gradient",
    }
)
ROLES = ("input", "weight", "output", "gradient", "input_gradient", "weight_gradient")
_PLAIN = {Arithmetic.FP32: FP32, Arithmetic.BF16: BF16, Arithmetic.FP16: FP16}


def format_of(arithmetic: Arithmetic, role: str) -> Format:
    """Return the format of an operand, or of a result, of a product."""
    if arithmetic is not Arithmetic.FP8:
        return _PLAIN[arithmetic]
    if role in RESULTS.values():
        return BF16  # what an FP8 product hands on
    return E5M2 if role == "gradient" else E4M3


@dataclass(frozen=True, slots=True)
class Promotion:
    """One product of one matrix that runs in something wider than the candidate."""

    matrix: str  # as named_modules() spells it
    gemm: Gemm
    arithmetic: Arithmetic

    def to_json(self) -> dict[str, str]:
        """Return plain JSON."""
        return {
            "matrix": self.matrix,
            "gemm": str(self.gemm),
            "arithmetic": str(self.arithmetic),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A precision to train in."""

    name: str
    arithmetic: Arithmetic
    masters: bool = True  # False: weights and optimizer state in 16 bits alone
    loss_scaling: LossScaling | None = None
    dynamic: bool = True  # False: the loss scale stays what it is at first
    scaling: Scaling | None = None  # of FP8 tensors
    promotions: tuple[Promotion, ...] = ()

    def __post_init__(self) -> None:
        if (self.arithmetic is Arithmetic.FP8) != (self.scaling is not None):
            raise SpecError(f"{self.name}: FP8, and nothing else, has a scaling")
        if not self.masters and self.arithmetic is Arithmetic.FP32:
            raise SpecError(f"{self.name}: fp32 weights are their own masters")
        if not self.masters and self.loss_scaling is not None:
            raise SpecError(
                f"{self.name}: torch's GradScaler refuses gradients in 16 bits, so "
                "there is no loss scaling without master weights"
            )

    @property
    def storage(self) -> Format:
        """The format that weights are updated in."""
        if self.masters:
            return FP32
        return FP16 if self.arithmetic is Arithmetic.FP16 else BF16

    @property
    def base(self) -> Arithmetic:
        """What everything but FP8's matrices is computed in."""
        fp8 = self.arithmetic is Arithmetic.FP8
        return Arithmetic.BF16 if fp8 else self.arithmetic

    def runs(self, matrix: str, gemm: Gemm) -> Arithmetic:
        """Return what a product is computed in."""
        for promotion in self.promotions:
            if promotion.matrix == matrix and promotion.gemm is gemm:
                return promotion.arithmetic
        return self.arithmetic

    def promoted(self, more: Iterable[Promotion]) -> "Candidate":
        """Return the candidate with these products promoted as well."""
        kept = {(p.matrix, p.gemm): p for p in (*self.promotions, *more)}
        return replace(self, promotions=tuple(kept.values()))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {
            **asdict(self),
            "arithmetic": str(self.arithmetic),
            "scaling": None if self.scaling is None else str(self.scaling),
            "loss_scaling": asdict(self.loss_scaling) if self.loss_scaling else None,
            "promotions": [p.to_json() for p in self.promotions],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Candidate":
        """Inverse of `to_json`."""
        scaling, loss = data["scaling"], data["loss_scaling"]
        if loss:
            loss = LossScaling(**{**loss, "rules": tuple(loss["rules"])})
        return cls(
            **{
                **data,
                "arithmetic": Arithmetic(data["arithmetic"]),
                "scaling": scaling and Scaling(scaling),
                "loss_scaling": loss,
                "promotions": tuple(
                    Promotion(p["matrix"], Gemm(p["gemm"]), Arithmetic(p["arithmetic"]))
                    for p in data["promotions"]
                ),
            }
        )


BASELINE = Candidate(name="fp32", arithmetic=Arithmetic.FP32)
CANDIDATES: Mapping[str, Candidate] = MappingProxyType(
    {
        c.name: c
        for c in (
            Candidate(name="bf16", arithmetic=Arithmetic.BF16),
            Candidate(
                name="fp16", arithmetic=Arithmetic.FP16, loss_scaling=LossScaling()
            ),
            Candidate(
                name="fp8_current", arithmetic=Arithmetic.FP8, scaling=Scaling.CURRENT
            ),
            Candidate(
                name="fp8_delayed", arithmetic=Arithmetic.FP8, scaling=Scaling.DELAYED
            ),
        )
    }
)
"""What a probe tries, by name; each also without master weights where that is asked."""

FASTEST_FIRST = ("fp8_delayed", "fp8_current", "bf16", "fp16", "fp32")
"""Delayed scales save a pass over each tensor; bf16 needs no loss scaling."""


def without_masters(candidate: Candidate) -> Candidate:
    """Return the candidate whose weights are updated in 16 bits, and nowhere else."""
    return replace(
        candidate,
        name=f"{candidate.name}_no_masters",
        masters=False,
        loss_scaling=None,
    )


def unusable(candidate: Candidate, device: Device) -> str | None:
    """Say why a device has no units for a candidate; None: it has."""
    if candidate.arithmetic is Arithmetic.FP8:
        has = device.multiplies("fp8_e4m3")
        return None if has else f"{device.name} has no units that multiply FP8"
    if candidate.arithmetic is Arithmetic.BF16 and "bf16" not in device.native:
        return f"{device.name} has no bf16 arithmetic"
    return None
