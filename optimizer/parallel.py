"""Tensor parallelism: several devices that share every layer, and who can."""

from optimizer import kernels
from optimizer.hardware import LOCAL, Device
from optimizer.stack import Component, ModelShape

ALONE = f"{LOCAL} is the worker's one device: tensor_parallel must be 1"


def refusal(model: ModelShape, device: Device, ways: int) -> str | None:
    """Say why a model is not served by so many devices together; None: it is."""
    if ways == 1:
        return None
    known = kernels.tables(device.id)
    timed = known is not None and ways in known.reductions
    if not device.link_bytes_s and not timed:
        return f"{device.name} has no link to {ways - 1} others"
    heads = _heads(model)
    if heads % ways:
        even = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        return (
            f"{heads} attention heads are not split evenly over {ways} devices: "
            f"tensor_parallel may be one of {even}"
        )
    return None


def _heads(model: ModelShape) -> int:
    return next(
        s.heads for s in model.sites if s.site.component is Component.ATTN_SCORES
    )
