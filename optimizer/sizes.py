"""Bytes of tensors in each format, with their scales."""

import math

from optimizer.formats import FORMATS
from optimizer.stack import GROUP_SIZES, Granularity, Precision

SCALE_BYTES = 4  # scales are fp32, but for those of mx and nv, which are one byte each


def size_bytes(fmt: str) -> float:
    """Return the bytes of one element. KeyError for a format that does not exist."""
    return FORMATS[fmt].bits / 8


def held_bytes(elements: int, row: int, precision: Precision) -> int:
    """Return the bytes of a matrix whose rows have `row` elements, scales included."""
    held = math.ceil(elements * size_bytes(precision.format))
    if not FORMATS[precision.format].scaled or not elements:
        return held
    return held + _scale_bytes(math.ceil(elements / row), row, precision.granularity)


def _scale_bytes(rows: int, row: int, granularity: Granularity) -> int:
    groups = math.ceil(row / GROUP_SIZES.get(granularity, row))
    match granularity:
        case Granularity.TENSOR:
            return SCALE_BYTES
        case Granularity.BLOCK:
            return SCALE_BYTES * groups * math.ceil(rows / GROUP_SIZES[granularity])
        case Granularity.MX:
            return rows * groups
        case Granularity.NV:
            return rows * groups + SCALE_BYTES
        case _:
            return SCALE_BYTES * rows * groups
