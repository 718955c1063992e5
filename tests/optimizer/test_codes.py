from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from optimizer.formats import E4M3, E5M2, FORMATS, Format
from optimizer.quantize import (
    from_codes,
    to_codes,
)
from optimizer.reference import decode
from optimizer.stack import Granularity
from tests.optimizer.numbers import (
    EIGHT_BITS,
    normal,
)

ONE = torch.ones(())
TENSOR = Granularity.TENSOR

fp8 = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
eight_bits = pytest.mark.parametrize("fmt", EIGHT_BITS, ids=lambda f: f.name)


# Bytes


@eight_bits
def test_every_code_survives_values_and_back(fmt: Format) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = from_codes(codes, fmt)
    finite = values.isfinite()
    assert torch.equal(to_codes(values[finite], fmt), codes[finite])
    assert values[finite].tolist() == [decode(fmt, int(c)) for c in codes[finite]]


@eight_bits
def test_nan_keeps_a_code_of_nan(fmt: Format) -> None:
    assert from_codes(to_codes(torch.tensor([torch.nan]), fmt), fmt).isnan().all()


@pytest.mark.parametrize("name", ["fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "int8", "int4"])
def test_small_formats_have_codes_too(name: str) -> None:
    fmt = FORMATS[name]
    codes = torch.arange(1 << fmt.bits, dtype=torch.uint8)
    values = from_codes(codes, fmt)
    kept = values.abs() <= fmt.max  # not the lowest integer, which is never made
    assert kept.sum() == len(codes) - fmt.integer
    assert torch.equal(to_codes(values[kept], fmt), codes[kept])


@fp8
def test_codes_are_what_torch_reads_as_its_own_dtype(fmt: Format) -> None:
    dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[fmt.name]
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.view(dtype).float()
    torch.testing.assert_close(
        from_codes(codes, fmt), theirs, rtol=0, atol=0, equal_nan=True
    )


# Case A5
@pytest.mark.parametrize(("fmt", "count"), [(E4M3, 7), (E5M2, 3)])
def test_subnormals_survive_a_file(fmt: Format, count: int, tmp_path: Path) -> None:
    values = torch.arange(1, count + 1) * fmt.smallest_subnormal
    save_file({"weight": to_codes(values, fmt)}, tmp_path / "weight.safetensors")
    codes = load_file(tmp_path / "weight.safetensors")["weight"]
    assert codes.tolist() == list(range(1, count + 1))
    assert torch.equal(from_codes(codes, fmt), values)


@pytest.mark.parametrize("view", [lambda w: w.t(), lambda w: w[:, ::2]])
def test_strides_do_not_change_bytes(view: object) -> None:  # case C19
    weight = view(normal(6, 8))  # type: ignore[operator]
    codes = to_codes(weight, E4M3)
    assert codes.is_contiguous()
    assert torch.equal(codes, to_codes(weight.contiguous(), E4M3))
    assert from_codes(codes.t(), E4M3).is_contiguous()
