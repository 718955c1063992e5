"""The numbers where rounding goes wrong, and the tensors that tests make of them."""

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from optimizer.formats import FORMATS, KNOWN, Format
from optimizer.quantize import amax, scale_from_amax
from optimizer.reference import decode, round_to
from optimizer.stack import Granularity

ORACLES: dict[str, type] = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,  # ml_dtypes' float8_e4m3 is another format
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "fp8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
NARROW = [FORMATS[name] for name in ORACLES if KNOWN[name].signed]
EIGHT_BITS = [fmt for fmt in NARROW if fmt.bits == 8]


def every_value(fmt: Format) -> NDArray[np.float32]:
    """Every finite number of the format, ascending, both zeros as one."""
    values = np.array([decode(fmt, code) for code in range(1 << fmt.bits)])
    return np.unique(values[np.isfinite(values)]).astype(np.float32)


def ties_and_neighbors(fmt: Format) -> NDArray[np.float32]:
    """Every midpoint of two numbers, the float32 on each side, and beyond the end."""
    values = every_value(fmt).astype(np.float64)
    ties = ((values[1:] + values[:-1]) / 2).astype(np.float32)  # exact: one more bit
    infinity = np.float32(np.inf)
    ends = np.array([-fmt.max, fmt.max], dtype=np.float32)
    return np.concatenate(
        [
            ties,
            np.nextafter(ties, infinity),
            np.nextafter(ties, -infinity),
            np.nextafter(ends, [-infinity, infinity]),
            np.array([-np.inf, np.inf, -0.0, 0.0, 1e-45, -1e-45], dtype=np.float32),
        ]
    )


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))


def by_definition(x: Tensor, fmt: Format) -> Tensor:
    flat = [round_to(fmt, v) for v in x.flatten().tolist()]
    return torch.tensor(flat).view(x.shape)


def scaled(x: Tensor, granularity: Granularity, fmt: Format) -> Tensor:
    return scale_from_amax(amax(x, granularity), fmt)
