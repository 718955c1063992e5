"""What a device may be asked for, and the reason for each "no": `rules`, asked for all.

The questions are put for sites whose sizes are multiples of everything, so that the
answers speak of the device and the engine; `SHAPE_RULES` says what sizes must be.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from optimizer.hardware import SUPPORT, Device
from optimizer.rules import FP8_MULTIPLE, matmul_refusal, named_format, refusals
from optimizer.stack import (
    CHOICES,
    GROUP_SIZES,
    LINEAR,
    Choice,
    Component,
    Site,
    SiteShape,
)
from optimizer.support import Matmul, Scaling

_SIZE, _HEADS, _HEAD_DIM = 4096, 32, 128  # multiples of 128, as blocks need them

FORMATS = tuple(
    sorted({named_format(choice) for every in CHOICES.values() for choice in every})
)
"""Every format that a request may name."""

SHAPE_RULES = {
    "multiples": f"K and N of a narrow matmul, and head_dim of FP8 attention, are "
    f"multiples of {FP8_MULTIPLE}; weight-only choices have no such rule",
    "groups": "K is a multiple of what shares a scale: "
    + ", ".join(f"{size} ({name})" for name, size in GROUP_SIZES.items())
    + "; no block lies across two fused matrices",
    "one_e5m2": "one operand of a matmul may be e5m2, never both",
    "output": "a narrow matmul hands on bf16, which the device must have",
}

_WITH_OTHER_KERNELS = ("any", "vllm")
_WIDENED = (Scaling.TENSOR, Scaling.TOKEN_CHANNEL, Scaling.BLOCK)  # Marlin's scales


class Status(StrEnum):
    """What becomes of a choice on a device."""

    SUPPORTED = "supported"
    WEIGHT_ONLY = "weight_only"  # narrow in memory, computed in 16 bits
    OTHER_KERNEL = "other_kernel"  # runs in an engine, not on the vendor's kernels
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Answer:
    """A status, and where it is not "supported" the reason."""

    status: Status
    reason: str | None = None


YES = Answer(Status.SUPPORTED)


def matmuls(device: Device) -> dict[Matmul, Answer]:
    """Answer for every pair of narrow operands that any device multiplies."""
    return {pair: _matmul(device, pair) for pair in sorted(_pairs())}


def _pairs() -> Iterator[Matmul]:
    for support in SUPPORT.values():
        yield from (p for p in support.matmul if not p.input.endswith("fnuz"))
    yield Matmul("fp8_e5m2", "fp8_e5m2", Scaling.TENSOR)


def _matmul(device: Device, pair: Matmul) -> Answer:
    reason = matmul_refusal(device, pair)
    if reason is None:
        return YES
    if reason in device.support.other_kernels.values():
        return Answer(Status.OTHER_KERNEL, reason)
    stored = pair.weight in device.support.stored_weights
    if stored and pair.scaling in _WIDENED and not device.multiplies(pair.weight):
        gain = f"{reason}; weights stored in {pair.weight} and widened as they are read"
        return Answer(
            Status.WEIGHT_ONLY, f"{gain} gain memory and bandwidth, no compute"
        )
    return Answer(Status.REFUSED, reason)


def choices(device: Device, engine: str) -> dict[Component, dict[Choice, Answer]]:
    """Answer for every choice of every component. Raises HardwareError: no such engine."""
    found = {}
    for component in CHOICES:
        asked = refusals(device, engine, _typical(component), FORMATS)
        found[component] = {
            choice: _choice(device, engine, component, choice, reason)
            for choice, reason in asked.items()
        }
    return found


def _choice(
    device: Device,
    engine: str,
    component: Component,
    choice: Choice,
    reason: str | None,
) -> Answer:
    if reason is None:
        table = component is Component.EMBEDDINGS and choice.is_narrow
        if not (choice.weight_only or table):
            return YES
        assert choice.weight is not None
        return Answer(
            Status.WEIGHT_ONLY,
            f"{choice.weight.format} in memory, {choice.input.format} in arithmetic",
        )
    elsewhere = reason in device.support.other_kernels.values()
    if elsewhere and engine in _WITH_OTHER_KERNELS:
        return Answer(Status.OTHER_KERNEL, reason)
    return Answer(Status.REFUSED, reason)


@lru_cache(maxsize=4096)  # a request asks for each of its formats: milliseconds
def unusable(device: Device, engine: str, fmt: str) -> str | None:
    """Say why no site gets `fmt` on a device in an engine, or None where one does."""
    asked = choices(device, engine)
    order = sorted(
        asked, key=lambda component: component not in LINEAR
    )  # they tell most
    answers = [
        answer
        for component in order
        for choice, answer in asked[component].items()
        if named_format(choice) == fmt
    ]
    if any(a.status in (Status.SUPPORTED, Status.WEIGHT_ONLY) for a in answers):
        return None
    return answers[0].reason if answers else f"no choice is in {fmt}"


def _typical(component: Component) -> SiteShape:
    return SiteShape(
        Site(0, component),
        n=_SIZE,
        k=_SIZE,
        weight_elements=_SIZE * _SIZE,
        heads=_HEADS,
        kv_heads=_HEADS,
        head_dim=_HEAD_DIM,
        elements=_SIZE,
    )
