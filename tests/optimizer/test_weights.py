"""Safetensors files with one defect each: refused by name, before they cost anything."""

import struct
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from optimizer import weights
from optimizer.checkpoint import check_values, inspect
from optimizer.errors import ModelError, NonFiniteError
from optimizer.folder import WEIGHTS
from optimizer.weights import StoredTensor, read_header, refuse_non_finite
from tests.optimizer.by_hand import (
    NUMPY,
    entry,
    write_file,
    write_folder,
    write_tensors,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


def test_the_safetensors_library_writes_what_we_read(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    arrays = {"x": np.ones((3, 5), np.float16), "empty": np.ones((0, 4), np.float32)}
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "x.safetensors")
    assert {name: t.shape for name, t in found.items()} == {
        name: array.shape for name, array in arrays.items()
    }


# --- crafted headers -------------------------------------------------------------

F32_4 = entry("F32", [4], 0, 16)
CRAFTED: dict[str, tuple[bytes, str]] = {
    "length of 2^64-1": (b"\xff" * 8 + b"{}", "truncated"),
    "length beyond the file": (struct.pack("<Q", 100) + b"{}", "truncated"),
    "shorter than a length": (b"\x02\x00", "truncated"),
    "empty file": (b"", "truncated"),
    "header of one byte": (struct.pack("<Q", 1) + b"{}", "a header of 1 bytes"),
}
HEADERS: dict[str, tuple[object, int, str]] = {
    "not an object": (b"[1, 2]", 0, "does not begin with {"),
    "leading space": (b" {}", 0, "does not begin with {"),
    "bad JSON": (b'{"a": ', 0, "not JSON: Expecting value"),
    "no JSON": (b"{junk", 0, "not JSON: Expecting property name"),
    "not UTF-8": (b'{"\xff": 1}', 0, "can't decode byte"),
    "nested a million deep": (b'{"a":' + b"[" * 1_000_000, 0, "1000000 lists"),
    "nested deep": (b'{"a":' + b"[" * 300_000, 0, "nested too deeply"),
    "duplicate tensor": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        2,
        "'a' comes twice",
    ),
    "duplicate key in a tensor": (
        b'{"a":{"dtype":"U8","dtype":"F32","shape":[1],"data_offsets":[0,1]}}',
        1,
        "'dtype' comes twice",
    ),
    "overlap": ({"a": F32_4, "b": entry("F32", [4], 8, 24)}, 24, "'b' overlaps"),
    "hole": ({"a": F32_4, "b": entry("F32", [4], 20, 36)}, 36, "'b' follows a hole"),
    "trailing bytes": ({"a": F32_4}, 17, "bytes after the last tensor"),
    "truncated values": ({"a": F32_4}, 15, "truncated"),
    "end of 2^62": ({"a": entry("U8", [1], 0, 1 << 62)}, 0, "something else than"),
    "2^50 elements": (
        {"a": entry("U8", [1 << 25, 1 << 25], 0, 1 << 50)},
        0,
        "impossible shape",
    ),
    "shape overflow": (
        {"a": entry("F32", [1 << 32, 1 << 32, 0], 0, 16)},
        16,
        "has 16 bytes",
    ),
    "negative shape": ({"a": entry("F32", [-4], 0, 16)}, 16, "something else than"),
    "shape of booleans": ({"a": entry("U8", [True], 0, 1)}, 1, "something else than"),
    "fractional shape": ({"a": entry("U8", [1.0], 0, 1)}, 1, "something else than"),
    "rank of nine": ({"a": entry("U8", [1] * 9, 0, 1)}, 1, "at most 8 numbers"),
    "rank of a million": (
        {"a": entry("U8", [1] * 10**6, 0, 1)},
        1,
        "at most 8 numbers",
    ),
    "size that does not fit": ({"a": entry("F32", [3], 0, 16)}, 16, "has 16 bytes"),
    "three offsets": (
        {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}},
        1,
        "not two numbers",
    ),
    "missing dtype": ({"a": {"shape": [1], "data_offsets": [0, 1]}}, 1, "needs dtype"),
    "tensor that is a number": ({"a": 1}, 0, "needs dtype"),
    "unknown dtype": ({"a": entry("C64", [1], 0, 8)}, 8, "unknown dtype 'C64'"),
    "dtype that is a list": (
        {"a": {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]}},
        16,
        "unknown dtype",
    ),
    "MX scales": ({"w": entry("F8_E8M0", [16], 0, 16)}, 16, "already quantized"),
    "FP4": ({"w": entry("F4", [32], 0, 16)}, 16, "already quantized"),
    "name too long": ({"n" * 513: F32_4}, 16, "too long"),
    "name with a control character": ({"a\x1b[2J": F32_4}, 16, "not printable"),
    "empty name": ({"": F32_4}, 16, "is empty"),
    "metadata that is no text": ({"__metadata__": {"a": 1}}, 0, "nothing but strings"),
    "metadata that is a list": ({"__metadata__": []}, 0, "nothing but strings"),
}


@pytest.mark.parametrize("kind", CRAFTED)
def test_crafted_file_is_refused(folder: Path, kind: str) -> None:
    content, message = CRAFTED[kind]
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(ModelError, match=f"{WEIGHTS} is refused: .*{message}"):
        inspect(folder)


@pytest.mark.parametrize("kind", HEADERS)
def test_crafted_header_is_refused(folder: Path, kind: str) -> None:
    header, size, message = HEADERS[kind]
    write_file(folder / WEIGHTS, header, bytes(size))
    with pytest.raises(ModelError, match=f"{WEIGHTS} is refused: .*{message}"):
        inspect(folder)


def test_header_of_95_mb_is_refused_unread(folder: Path) -> None:
    with (folder / WEIGHTS).open("wb") as file:  # sparse: takes no disk
        file.write(struct.pack("<Q", 95_000_000))
        file.truncate(95_000_008)
    with pytest.raises(ModelError, match="a header of 95000000 bytes"):
        inspect(folder)


def test_too_many_tensors_are_refused_before_they_are_parsed(folder: Path) -> None:
    count = 400_000  # 24 MB of header; parsing it takes 3 s and 400 MB
    one = '"{}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    text = "{" + ",".join(one.format(i) for i in range(count)) + "}"
    write_file(folder / WEIGHTS, text.encode())
    tracemalloc.start()
    with pytest.raises(ModelError, match=f"{count + 1} objects: 200000 tensors"):
        inspect(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * len(text)  # nothing but the header itself


# --- values ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E5M2"])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_non_finite_weight_is_named_with_its_file(
    folder: Path, dtype: str, bad: float
) -> None:
    values = np.ones((4, 5))
    values[-1, -1] = bad
    write_tensors(folder / WEIGHTS, {"fine": np.ones(3), "broken": values}, dtype)
    with pytest.raises(NonFiniteError) as caught:
        refuse_non_finite(folder, read_header(folder / WEIGHTS))
    assert caught.value.where == f"tensor broken of {WEIGHTS}"


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"])
def test_the_largest_finite_values_pass(folder: Path, dtype: str) -> None:
    limits = ml_dtypes.finfo(NUMPY[dtype])
    extremes = [limits.max, limits.min, limits.tiny, limits.smallest_subnormal, -0.0]
    values = np.array(extremes, NUMPY[dtype])
    write_tensors(folder / WEIGHTS, {"w": values}, dtype)
    refuse_non_finite(folder, read_header(folder / WEIGHTS))


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F8_E4M3", "F8_E5M2"])
def test_all_patterns_agree_with_ml_dtypes(tmp_path: Path, dtype: str) -> None:
    size = np.dtype(NUMPY[dtype]).itemsize
    patterns = np.arange(1 << 8 * size, dtype=f"u{size}")
    with np.errstate(invalid="ignore"):  # signaling NaNs are among them
        finite = np.isfinite(patterns.view(NUMPY[dtype]))
    refused = patterns[~finite]
    np.concatenate([refused, patterns[finite]]).tofile(tmp_path / "all")
    for start in range(0, refused.nbytes, size):
        with pytest.raises(NonFiniteError):
            refuse_non_finite(
                tmp_path, {"w": StoredTensor(dtype, (1,), "all", start, start + size)}
            )
    end = patterns.nbytes
    rest = StoredTensor(dtype, (int(finite.sum()),), "all", refused.nbytes, end)
    refuse_non_finite(tmp_path, {"w": rest})


def test_integers_are_never_non_finite(folder: Path) -> None:
    write_tensors(folder / WEIGHTS, {"ids": np.array([-1, 2**62])}, "I64")
    check_values(inspect(folder))


def test_last_element_of_a_large_tensor_is_seen_in_bounded_memory(folder: Path) -> None:
    # Two chunks and one element: the bad value is alone in the third.
    values = np.ones(2 * weights.CHUNK_BYTES // 4 + 1, np.float32)
    values[-1] = np.nan
    write_tensors(folder / WEIGHTS, {"w": values}, "F32")
    checkpoint = inspect(folder)
    tracemalloc.start()
    with pytest.raises(NonFiniteError):
        check_values(checkpoint)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


def test_file_that_shrinks_while_it_is_read_is_an_error(folder: Path) -> None:
    checkpoint = inspect(folder)
    (folder / WEIGHTS).write_bytes(b"")
    with pytest.raises(ModelError, match="became shorter"):
        check_values(checkpoint)
