"""Uniform stacks: one format for every matrix, as far as a device and an engine go.

What FP8 checkpoints leave in 16 bits stays there: embeddings, the head and everything
that is no matrix (vLLM's and compressed-tensors' recipes ignore `lm_head`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from optimizer.hardware import Device
from optimizer.rules import refusals
from optimizer.stack import (
    LINEAR,
    Choice,
    Component,
    ModelShape,
    Site,
    SiteShape,
    Stack,
)

E4M3 = "fp8_e4m3"
WEIGHT_ONLY = "fp8_e4m3_weight_only"
NARROWED = LINEAR - {Component.LM_HEAD}
_ON_REQUEST = MappingProxyType(  # by name: the format that asks for it, the choice
    {
        "int8": ("int8", "int8"),
        "fp4": ("fp4_e2m1", "fp4_e2m1_nv"),
        "int4_weight_only": ("int4", "int4_weight_only"),
    }
)


@dataclass(frozen=True, slots=True)
class Uniform:
    """A stack and its name; or, where the device or the engine has none, why not."""

    name: str
    stack: Stack | None
    refused: str | None = None
    kept: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class _Plan:
    """What matrices of layers get, the cache, and everything else."""

    linear: str
    cache: str
    rest: str


def uniforms(
    model: ModelShape, device: Device, engine: str, formats: tuple[str, ...]
) -> tuple[Uniform, ...]:
    """Return the uniform stacks from wide to narrow; a device without 16 bits has one.

    `formats` are those that may be used; fp32 and the 16-bit format always are, and of
    the formats on request each has a stack where it is named.
    """
    base = device.base16 or "fp32"
    plans = {
        "fp32": _Plan("fp32", "fp32", "fp32"),
        base: _Plan(base, base, base),
        "fp8_weight_only": _Plan(WEIGHT_ONLY, base, base),
        "fp8": _Plan(E4M3, base, base),
        "fp8_kv_cache": _Plan(E4M3, E4M3, base),
        **{
            name: _Plan(linear, base, base)
            for name, (fmt, linear) in _ON_REQUEST.items()
            if fmt in formats
        },
    }
    asked = [
        (shape, sites, _verdicts(shape, device, engine, formats))
        for shape, sites in _alike(model).items()
    ]
    return tuple(_uniform(name, plan, asked) for name, plan in plans.items())


Verdicts = Mapping[str, tuple[Choice, str | None]]  # by name; None: not refused
Asked = tuple[SiteShape, list[Site], Verdicts]


def _alike(model: ModelShape) -> dict[SiteShape, list[Site]]:
    """Return the sites by what a device is asked about them: size, not layer."""
    found: dict[SiteShape, list[Site]] = {}
    for shape in model.sites:
        alike = replace(shape, site=Site(0, shape.site.component))
        found.setdefault(alike, []).append(shape.site)
    return found


def _verdicts(
    shape: SiteShape, device: Device, engine: str, formats: tuple[str, ...]
) -> Verdicts:
    found = refusals(device, engine, shape, formats)
    return {choice.name: (choice, why) for choice, why in found.items()}


def _wanted(plan: _Plan, component: Component) -> str:
    if component in NARROWED:
        return plan.linear
    return plan.cache if component is Component.KV_CACHE else plan.rest


def _uniform(name: str, plan: _Plan, asked: Sequence[Asked]) -> Uniform:
    """Build one stack; a matrix that cannot be narrowed keeps the format of the rest."""
    choices: dict[Site, Choice] = {}
    kept: dict[str, str] = {}
    narrowed = 0
    for shape, sites, verdicts in asked:
        component = shape.site.component
        choice, why = verdicts[_wanted(plan, component)]
        may_stay = component in NARROWED and plan.linear != plan.rest
        if may_stay and why is None:
            narrowed += 1
        elif may_stay and why is not None:
            kept[str(component)] = why
            choice, why = verdicts[plan.rest]
        if why is not None:
            return Uniform(name, None, why)
        choices |= dict.fromkeys(sites, choice)
    if kept and not narrowed:
        return Uniform(name, None, next(iter(kept.values())))
    return Uniform(name, Stack(choices), None, MappingProxyType(kept))
