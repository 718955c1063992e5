"""Shapes that FP8 kernels refuse, made to fit with zeros: which, what it costs, when it pays.

Kernels take K and N in steps of 16 (`rules.FP8_MULTIPLE`). Zeros in added columns of
both operands add nothing to any sum, and added rows of the weight make outputs that
nobody reads: the rest is the product as it was. GPT-2's head, 768 -> 50257, becomes
768 -> 50272. What is added is stored, read and multiplied, so a padded site is costed
at its padded shape. Experts are not padded: a kernel runs many of them as one.
"""

from dataclasses import dataclass, replace

from optimizer import kernels
from optimizer.cost import site_cost
from optimizer.hardware import Device
from optimizer.rules import FP8_MULTIPLE, refusals
from optimizer.spec import OptimizeSpec
from optimizer.stack import LINEAR, Choice, ModelShape, SiteShape, choice_named

# Engines that take a matrix of another shape than the model's configuration says.
# vLLM and torchao build their layers from the configuration.
PADDING_ENGINES = frozenset({"any", "transformer_engine"})


@dataclass(frozen=True, slots=True)
class Padding:
    """What a kernel gets for a matrix (n, k): zeros below and to the right."""

    n: int  # rows of the weight that are the model's
    k: int  # columns that are the model's
    padded_n: int
    padded_k: int


def fitting(size: int) -> int:
    """Return the smallest multiple of 16 that holds `size`: 50257 -> 50272."""
    return size + -size % FP8_MULTIPLE


def padding(shape: SiteShape, choice: Choice) -> Padding | None:
    """Return how a site is padded under a choice; None: it runs as it is.

    Only products of two narrow operands need it, so weight-only choices do not.
    """
    multiplies = choice.is_narrow and not choice.weight_only
    if shape.site.component not in LINEAR or not multiplies or shape.active_share < 1:
        return None
    n, k = fitting(shape.n), fitting(shape.k)
    if (n, k) == (shape.n, shape.k):
        return None
    return Padding(shape.n, shape.k, n, k)


def padded(shape: SiteShape, choice: Choice) -> SiteShape:
    """Return the shape that a kernel runs, which is what costs time and memory."""
    to = padding(shape, choice)
    if to is None:
        return shape
    elements = to.padded_n * to.padded_k
    return replace(shape, n=to.padded_n, k=to.padded_k, weight_elements=elements)


def pays(
    shape: SiteShape,
    choice: Choice,
    device: Device,
    spec: OptimizeSpec,
    model: ModelShape,
) -> bool:
    """Whether a choice that is refused as it is runs when padded, and gains by it.

    It must be faster than 16 bits unpadded, for a token or up to the first one.
    """
    if padding(shape, choice) is None or spec.engine not in PADDING_ENGINES:
        return False
    run = padded(shape, choice)
    if refusals(device, spec.engine, run, spec.formats)[choice] is not None:
        return False
    wide = choice_named(shape.site.component, device.base16 or "fp32")
    known = kernels.of_engine(device.id, spec.engine)
    narrow_cost, wide_cost = (
        site_cost(one, by, device, spec.workload, model, tables=known)
        for one, by in ((run, choice), (shape, wide))
    )
    return (
        narrow_cost.per_token_s < wide_cost.per_token_s
        or narrow_cost.first_token_s < wide_cost.first_token_s
    )
