"""What lies in a tensor, by powers of two, and what a format would make of it.

Counts are exact and mergeable: of a batch cut in pieces, or of several processes, they
add up to those of the whole.

Example: [0, 0.75, 2e-8] has one zero and the exponents -1 and -26. In fp16 2e-8 becomes
zero as well: it lies under half of the smallest subnormal, 2^-25 = 2.98e-8.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from optimizer.formats import Format
from optimizer.quantize import IEEE_DTYPES, fake_quantize

LOWEST, HIGHEST = -127, 127  # -127: float32's subnormals, all below 2^-126
BINS = HIGHEST - LOWEST + 1
PART = 1 << 15  # elements looked at together: in the cache, and in the calling thread
NEARLY = 0.999  # times a limit: below it no rounding of a division reaches it
FP8_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def rounded(x: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """Return finite x as `fmt` holds it under a scale: x ≈ result, float32.

    Saturates, as every FP8 recipe does, and as no 16-bit format: see `Taken.over`.
    """
    if x.device.type == "cpu":
        return fake_quantize(x, scale, fmt)
    # Other devices: clamped before the cast, which then is the same in every torch.
    dtype = {**IEEE_DTYPES, **FP8_DTYPES}.get(fmt.name, torch.float32)
    return (x.float() / scale).clamp(-fmt.max, fmt.max).to(dtype).float() * scale


def overflow_limit(fmt: Format) -> float:
    """Return the smallest |x| that rounds beyond the largest number: 65520 for fp16.

    That is half a step above it, or just over where the tie goes down, as in e4m3.
    """
    step = math.ldexp(1.0, math.frexp(fmt.max)[1] - 1 - fmt.mantissa_bits)
    limit = fmt.max + step / 2
    even = fmt.max / step % 2 == 0
    return math.nextafter(limit, math.inf) if even else limit


@dataclass(slots=True)
class Taken:
    """What a format makes of finite values: counts, and squares of the error."""

    flushed: int = 0  # not zero, and zero in the format
    over: int = 0  # beyond its largest number
    zeros: int = 0  # zero in the format, those that were before included
    noise: float = 0.0  # sum of squared errors

    def merge(self, other: "Taken") -> None:
        """Add another part's counts."""
        self.flushed += other.flushed
        self.over += other.over
        self.zeros += other.zeros
        self.noise += other.noise


@dataclass(slots=True)
class Seen:
    """All values of one tensor of one matrix, over the steps that were looked at."""

    counts: list[int] = field(default_factory=lambda: [0] * BINS)
    elements: int = 0
    zeros: int = 0
    infinite: int = 0
    nan: int = 0
    amax: float = 0.0  # of the finite values
    squares: float = 0.0  # their sum
    taken: dict[str, Taken] = field(default_factory=dict)  # by format

    @property
    def zero_rate(self) -> float:
        """The share of values that are zero."""
        return self.zeros / max(self.elements, 1)

    @property
    def nonfinite(self) -> int:
        """How many values are inf or NaN."""
        return self.infinite + self.nan

    def underflow_share(self, fmt: str) -> float:
        """Return the share of the nonzero finite values that become zero."""
        nonzero = self.elements - self.zeros - self.nonfinite
        return self.taken[fmt].flushed / max(nonzero, 1)

    def overflow_share(self, fmt: str) -> float:
        """Return the share of values beyond the format, inf and NaN included."""
        return (self.taken[fmt].over + self.nonfinite) / max(self.elements, 1)

    def zero_rate_in(self, fmt: str) -> float:
        """Return the share of values that are zero in a format."""
        return self.taken[fmt].zeros / max(self.elements, 1)

    def noise_share(self, fmt: str) -> float:
        """Return the squared error of rounding over the squared values."""
        return self.taken[fmt].noise / self.squares if self.squares else 0.0

    def below(self, exponent: int) -> int:
        """Return how many nonzero values lie under 2^exponent."""
        return sum(self.counts[: max(exponent - LOWEST, 0)])

    def merge(self, other: "Seen") -> None:
        """Add another part's counts."""
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.elements += other.elements
        self.zeros += other.zeros
        self.infinite += other.infinite
        self.nan += other.nan
        self.amax = max(self.amax, other.amax)
        self.squares += other.squares
        for name, taken in other.taken.items():
            self.taken.setdefault(name, Taken()).merge(taken)

    def to_json(self) -> dict[str, Any]:
        """Return JSON: {"first": exponent, "counts": [...], …}, empty ends left out."""
        filled = [i for i, count in enumerate(self.counts) if count]
        first, last = (filled[0], filled[-1]) if filled else (-LOWEST, -LOWEST - 1)
        plain = ("elements", "zeros", "infinite", "nan", "amax", "squares")
        return {
            "first": first + LOWEST,
            "counts": self.counts[first : last + 1],
            **{name: getattr(self, name) for name in plain},
            "taken": {
                k: [t.flushed, t.over, t.zeros, t.noise] for k, t in self.taken.items()
            },
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Seen":
        """Inverse of `to_json`."""
        plain = {k: v for k, v in data.items() if k not in ("first", "counts", "taken")}
        seen = cls(**plain, taken={k: Taken(*t) for k, t in data["taken"].items()})
        start = data["first"] - LOWEST
        seen.counts[start : start + len(data["counts"])] = data["counts"]
        return seen


SeenBy = dict[str, dict[str, Seen]]
"""What went through each matrix: by its name, and by role."""


def look(x: Tensor, formats: Mapping[str, tuple[Format, Tensor]]) -> Seen:
    """Return what lies in x, and what each format under its scale makes of it."""
    seen = Seen(taken={name: Taken() for name in formats})
    for part in x.detach().reshape(-1).split(PART):
        if len(part):  # an expert may have got no tokens
            seen.merge(_look(part.float(), formats))
    return seen


def _look(x: Tensor, formats: Mapping[str, tuple[Format, Tensor]]) -> Seen:
    """Look at a part of a tensor: (elements,) float32, at least one."""
    largest = _largest(x)
    finite = x if math.isfinite(largest) else x[x.isfinite()]
    if finite is not x:
        largest = _largest(finite) if len(finite) else 0.0
    nan = int(x.isnan().sum()) if len(finite) < len(x) else 0
    nonzero = int(finite.count_nonzero())
    seen = Seen(
        counts=_exponents(finite, len(finite) - nonzero),
        elements=len(x),
        zeros=len(finite) - nonzero,
        infinite=len(x) - len(finite) - nan,
        nan=nan,
        amax=largest,
        squares=_squares(finite),
    )
    for name, (fmt, scale) in formats.items():
        seen.taken[name] = _taken(finite, fmt, scale, seen)
    return seen


def _largest(x: Tensor) -> float:
    """Return the largest |x|; inf or NaN where there is one."""
    low, high = torch.aminmax(x)
    return float(torch.maximum(-low, high))


def _squares(x: Tensor) -> float:
    """Return the sum of squares, added up in float64."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64).square())


def _exponents(x: Tensor, zeros: int) -> list[int]:
    """Count the exponents of finite float32 values; the zeros among them nowhere."""
    biased = (x.view(torch.int32) >> 23).bitwise_and_(0xFF)
    found: list[int] = torch.bincount(biased, minlength=BINS)[:BINS].tolist()
    found[0] -= zeros
    return found


def _taken(x: Tensor, fmt: Format, scale: Tensor, seen: Seen) -> Taken:
    if not len(x):
        return Taken()
    near = rounded(x, scale, fmt)
    after = len(near) - int(near.count_nonzero())
    return Taken(
        flushed=after - seen.zeros,
        over=_over(x, fmt, scale, seen.amax),
        zeros=after,
        noise=_squares(near - x),
    )


def _over(x: Tensor, fmt: Format, scale: Tensor, largest: float) -> int:
    """Count what rounds beyond the format; nothing does where the largest does not."""
    limit = overflow_limit(fmt)
    if largest < NEARLY * limit * float(scale):
        return 0  # without a tensor of one value, which costs as much as a part does
    if float(torch.tensor(largest, dtype=x.dtype) / scale.cpu()) < limit:
        return 0
    return int(((x / scale).double().abs() >= limit).sum())
