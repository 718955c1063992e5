"""The number formats, as data: `data/formats.json`, checked against ml_dtypes.

OCP 8-bit Floating Point Specification 1.0 for E4M3 and E5M2; OCP Microscaling
Formats 1.0 for the 6- and 4-bit ones; IEEE 754 for fp16 and fp32. An integer is a
format without exponent bits, all of whose numbers are subnormals one apart; its
largest number is that of the symmetric range, 127 or 7. E8M0 holds the scales of MX
blocks and no tensors: powers of two, with neither sign nor zero.
"""

import json
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Format:
    """A binary floating-point format with subnormals, or a signed integer."""

    name: str
    exponent_bits: int
    mantissa_bits: int  # stored bits, without the implicit leading 1
    bias: int
    max: float  # largest finite value; overflow saturates to it
    has_inf: bool
    has_negative_zero: bool
    integer: bool = False  # two's complement
    signed: bool = True

    @property
    def bits(self) -> int:
        """Storage width, sign included."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number: of code 0 where that is none."""
        return self.signed - self.bias

    @property
    def smallest_normal(self) -> float:
        """Smallest number with a full significand."""
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        """Smallest number above zero."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def eps(self) -> float:
        """Distance from 1.0 to the next number."""
        return 2.0**-self.mantissa_bits

    @property
    def scaled(self) -> bool:
        """Whether tensors in this format carry a scale: its range is too small."""
        return self.bits <= 8


def _integer(name: str, row: dict[str, Any]) -> Format:
    stored = row["bits"] - 1  # beside the sign
    return Format(
        name=name,
        exponent_bits=0,
        mantissa_bits=stored,
        bias=1 - stored,  # which makes 1 the distance of two subnormals
        max=float(row["symmetric_quantisation_range"][1]),
        has_inf=False,
        has_negative_zero=False,
        integer=True,
    )


def _float(name: str, row: dict[str, Any]) -> Format:
    return Format(
        name=name,
        exponent_bits=row["exponent_bits"],
        mantissa_bits=row["mantissa_bits"],
        bias=row["bias"],
        max=row["max_finite"],
        has_inf=row["has_inf"],
        has_negative_zero=row["has_negative_zero"],
        signed=row["bits"] > row["exponent_bits"] + row["mantissa_bits"],
    )


def _read() -> dict[str, Format]:
    text = files("optimizer").joinpath("data/formats.json").read_text("utf-8")
    rows: dict[str, dict[str, Any]] = json.loads(text)["formats"]
    return {
        name: _integer(name, row) if name.startswith("int") else _float(name, row)
        for name, row in rows.items()
    }


KNOWN = MappingProxyType(_read())  # every format that may be looked at
FORMATS = MappingProxyType({k: f for k, f in KNOWN.items() if f.signed})  # of tensors
FP32 = FORMATS["fp32"]
BF16 = FORMATS["bf16"]
FP16 = FORMATS["fp16"]
E4M3 = FORMATS["fp8_e4m3"]
E5M2 = FORMATS["fp8_e5m2"]
E8M0 = KNOWN["e8m0"]
