"""How a site is run: in fp32 (`Reference`), or rounded as a stack says (`Stacked`).

A stack's matrices multiply *codes*: products of codes accumulated in fp32,
scaled, and rounded once to the output format, which is what a tensor core does.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from optimizer.errors import SpecError
from optimizer.formats import FORMATS
from optimizer.matmul import (
    grouped_product,
    integer_product,
    linear,
    scaled,
    scaled_product,
)
from optimizer.model import AttentionStep, LoadedModel
from optimizer.quantize import (
    amax,
    holds,
    mx_scale,
    nv_scale,
    quantize,
    round_to_format,
    scale_from_amax,
)
from optimizer.sites import LinearPart
from optimizer.stack import (
    GROUP_SIZES,
    Choice,
    Component,
    Granularity,
    Precision,
    Role,
    Site,
    Stack,
    roundings,
)

Operand = tuple[Tensor, Tensor | None]  # codes and their scale; no scale: plain values
Amaxes = Mapping[tuple[Site, Role], Tensor]  # (), or (heads,) for attention operands

STATIC = frozenset({Granularity.TENSOR, Granularity.HEAD, Granularity.NV})


class Reference:
    """Every site in fp32. Subclasses see or change what passes `tap`."""

    def tap(
        self, site: Site, role: Role, x: Tensor, mask: Tensor | None = None
    ) -> Operand:
        """See the tensor at one place of a site, before it is used.

        `mask` is additive, broadcastable to `x`: what it removes is never used.
        """
        return x, None

    def elementwise(
        self, site: Site, role: Role, x: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Return `x` as the site leaves it."""
        return apply_scale(*self.tap(site, role, x, mask))

    def linear(self, part: LinearPart, x: Tensor) -> Tensor:
        """Return x Wᵀ + b of one matrix: (..., in) -> (..., out)."""
        x = self.elementwise(part.site, Role.INPUT, x)
        y = linear(x, part.weight, part.bias)
        return self.elementwise(part.site, Role.OUTPUT, y)

    def attention(self, step: AttentionStep) -> Tensor:
        """Return (batch, heads, tokens, head_dim) in the four steps of design §4.

        QKᵀ and PV read what the cache gives back, the tokens just computed included.
        """
        cache, scores, softmax, values = (
            Site(step.layer, c)
            for c in (
                Component.KV_CACHE,
                Component.ATTN_SCORES,
                Component.ATTN_SOFTMAX,
                Component.ATTN_VALUES,
            )
        )
        groups = step.query.shape[1] // step.key.shape[1]
        key = self.elementwise(cache, Role.INPUT, step.key)
        value = self.elementwise(cache, Role.WEIGHT, step.value)
        q = self.tap(scores, Role.INPUT, step.query)
        k = shared(self.tap(scores, Role.WEIGHT, key), groups)
        s = multiply(q, transposed(k)) * step.scaling
        if step.softcap is not None:
            s = torch.tanh(s / step.softcap) * step.softcap
        s = self.elementwise(softmax, Role.INPUT, s, step.mask)
        if step.mask is not None:
            s = s + step.mask
        p = self.elementwise(softmax, Role.OUTPUT, s.softmax(dim=-1))
        v = shared(self.tap(values, Role.WEIGHT, value), groups)
        out = multiply(self.tap(values, Role.INPUT, p), v)
        return self.elementwise(values, Role.OUTPUT, out)


def apply_scale(codes: Tensor, scale: Tensor | None) -> Tensor:
    """Return the values that codes stand for."""
    return codes if scale is None else codes * scale


def shared(operand: Operand, groups: int) -> Operand:
    """Repeat each KV head for the `groups` query heads that read it."""
    codes, scale = operand
    if groups == 1:
        return operand
    if scale is not None and scale.ndim == 4 and scale.shape[1] > 1:
        scale = scale.repeat_interleave(groups, dim=1)
    return codes.repeat_interleave(groups, dim=1), scale


def transposed(operand: Operand) -> Operand:
    """Swap tokens and features, of the scales as of the codes."""
    codes, scale = operand
    if scale is not None and scale.ndim == codes.ndim:
        scale = scale.transpose(2, 3)
    return codes.transpose(2, 3), scale


def multiply(a: Operand, b: Operand) -> Tensor:
    """Return a @ b: codes in fp32 first, scales after."""
    product = a[0] @ b[0]
    for scale in (a[1], b[1]):
        if scale is not None:
            product = product * scale
    return product


def round_operand(
    x: Tensor, precision: Precision, calibrated: Tensor | None
) -> Operand:
    """Return `x` as codes of `precision.format` and their scale.

    Static granularities (tensor, head; the tensor's share of nv) take their scale
    from `calibrated`: the amax () or (heads,) of calibration; dynamic ones from `x`
    itself. The scale broadcasts against the codes; of groups it has their shape.
    """
    fmt = FORMATS[precision.format]
    if fmt.name == "fp32":
        return x, None
    if not fmt.scaled:
        return round_to_format(x, fmt), None
    if precision.granularity not in STATIC:
        scale = dynamic_scale(x, precision)
    elif calibrated is None:
        raise SpecError(f"{precision} is static, and nothing was calibrated for it")
    else:
        scale = static_scale(x, precision, calibrated)
    return quantize(x, scale, fmt), scale


def dynamic_scale(x: Tensor, precision: Precision) -> Tensor:
    """Return the scales that follow from `x` alone, broadcastable against it."""
    fmt = FORMATS[precision.format]
    largest = amax(x, precision.granularity)
    if precision.granularity is Granularity.MX:
        return mx_scale(largest, fmt)
    return scale_from_amax(largest, fmt)


def static_scale(x: Tensor, precision: Precision, calibrated: Tensor) -> Tensor:
    """Return the scales of `x` that rest on the amax () or (heads,) of calibration."""
    fmt = FORMATS[precision.format]
    match precision.granularity:
        case Granularity.HEAD:
            return scale_from_amax(calibrated.view(1, -1, 1, 1), fmt)
        case Granularity.NV:
            return nv_scale(amax(x, Granularity.NV), calibrated.amax(), fmt)
        case _:
            return scale_from_amax(calibrated.amax(), fmt)


def multiply_codes(x: Operand, weight: Operand, choice: Choice) -> Tensor:
    """Return x Wᵀ as the kernel of a linear `choice` sums and scales it: (..., n)."""
    assert choice.weight is not None
    shared_by = {choice.input.granularity, choice.weight.granularity}
    if choice.input.format == "fp16":  # more bits than `matmul_codes` promises
        return linear(x[0], weight[0])
    if FORMATS[choice.input.format].integer:
        return scaled(integer_product(x[0], weight[0]), x[1], weight[1])
    if shared_by & {Granularity.MX, Granularity.NV}:
        # Codes of 4 and 6 bits times their scales are exact in float32 (nv: but for
        # the last bit), so the units' sums of scaled products are plain ones.
        return linear(apply_scale(*x), apply_scale(*weight))
    if shared_by & {Granularity.BLOCK, Granularity.GROUP}:
        return grouped_product(*x, *weight, GROUP_SIZES[choice.weight.granularity])
    return scaled_product(*x, *weight)


class WeightCodes:
    """The rounded matrices of a model, each made once and shared by every stack."""

    def __init__(self, model: LoadedModel) -> None:
        self._siblings = model.parts
        self._made: dict[tuple[str, Precision], Operand] = {}
        model.residency.on_release(self.drop)  # a stage's weights go: so do these

    def drop(self) -> None:
        """Forget what was made; it is made again when it is asked for."""
        self._made.clear()

    def get(self, part: LinearPart, precision: Precision) -> Operand:
        """Return codes (out, in) and scale: (), (out, 1), or of groups (out, in)."""
        key = (part.name, precision)
        if key not in self._made:
            self._made[key] = self._round(part, precision)
        return self._made[key]

    def _round(self, part: LinearPart, precision: Precision) -> Operand:
        fmt = FORMATS[precision.format]
        weight = part.weight.contiguous()
        if fmt.name == "fp32":
            return weight, None
        if not fmt.scaled:
            # What was stored in the format is not kept a second time.
            return weight if holds(weight, fmt) else round_to_format(weight, fmt), None
        scale = self._scale(part, weight, precision)
        return quantize(weight, scale, fmt), scale

    def _scale(self, part: LinearPart, weight: Tensor, precision: Precision) -> Tensor:
        if precision.granularity not in STATIC:
            return dynamic_scale(weight, precision)
        # Engines fuse siblings (q, k, v; gate, up) into one matrix with one scale.
        fused = [p for p in self._siblings[part.site] if p.group == part.group]
        each = [p.weight.abs().amax() for p in fused]
        return static_scale(weight, precision, torch.stack(each))


class Stacked(Reference):
    """Every site as a stack says. Sites that the stack leaves out stay fp32."""

    def __init__(self, stack: Stack, amaxes: Amaxes, weights: WeightCodes) -> None:
        self._choices = stack.choices
        self._amaxes = amaxes
        self._weights = weights
        self._precisions = {
            (site, role): precision
            for site, choice in stack.choices.items()
            for role, precision in roundings(site.component, choice)
        }
        self._last: tuple[Site, Tensor, Operand] | None = None  # siblings share x

    def tap(
        self, site: Site, role: Role, x: Tensor, mask: Tensor | None = None
    ) -> Operand:
        """Round the tensor as the stack says."""
        precision = self._precisions.get((site, role))
        if precision is None:
            return x, None
        return round_operand(x, precision, self._amaxes.get((site, role)))

    def linear(self, part: LinearPart, x: Tensor) -> Tensor:
        """Multiply codes, scale, add the bias, round once."""
        choice = self._choices.get(part.site)
        if choice is None or choice.name == "fp32":
            return linear(x, part.weight, part.bias)
        assert choice.weight is not None
        weight = self._weights.get(part, choice.weight)
        rows = self._input(part.site, x)
        y = multiply_codes(rows, weight, choice)
        if part.bias is not None:
            y = y + part.bias
        return round_to_format(y, FORMATS[choice.output])

    def _input(self, site: Site, x: Tensor) -> Operand:
        if self._last is None or self._last[0] != site or self._last[1] is not x:
            self._last = (site, x, self.tap(site, Role.INPUT, x))
        return self._last[2]
