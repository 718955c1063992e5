import ml_dtypes
import numpy as np
import pytest

from optimizer.formats import E4M3, E5M2, FORMATS, FP32, Format
from tests.optimizer.numbers import NARROW, ORACLES


@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.name)
def test_constants_match_ml_dtypes(fmt: Format) -> None:
    limits = ml_dtypes.finfo(ORACLES[fmt.name])  # type: ignore[no-untyped-call]
    assert fmt.bits == limits.bits
    assert fmt.max == float(limits.max)
    assert fmt.eps == float(limits.eps)
    assert fmt.smallest_normal == float(limits.smallest_normal)
    assert fmt.smallest_subnormal == float(limits.smallest_subnormal)


def test_fp32_is_numpys() -> None:
    limits = np.finfo(np.float32)
    assert FP32.bits == 32
    assert FP32.max == float(limits.max)
    assert FP32.smallest_subnormal == float(limits.smallest_subnormal)


def test_e5m2_has_its_own_range() -> None:  # case A4: 448 would waste seven binades
    assert (E4M3.max, E5M2.max) == (448.0, 57344.0)


def test_only_formats_of_eight_bits_or_fewer_carry_scales() -> None:
    wide = {fmt.name for fmt in FORMATS.values() if not fmt.scaled}
    assert wide == {"fp32", "tf32", "bf16", "fp16"}
