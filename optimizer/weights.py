"""One safetensors file, read with suspicion and without the library.

A header can be 95 MB, name a tensor twice or overlap two of them, and the library
accepts some of that. Here it is refused from the header alone, before anything
allocates what it promises.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimizer.errors import ModelError, NonFiniteError

MAX_HEADER_BYTES = 25_000_000  # a model of 100,000 tensors needs 15 MB
MAX_TENSORS = 200_000
MAX_NAME_CHARACTERS = 512
MAX_RANK = 8
MAX_ELEMENTS = 1 << 48  # products beyond it could only come from a crafted header
CHUNK_BYTES = 16 << 20

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "F64": 8,
        "F32": 4,
        "F16": 2,
        "BF16": 2,
        "I64": 8,
        "I32": 4,
        "I16": 2,
        "I8": 1,
        "U8": 1,
        "BOOL": 1,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
    }
)
"""The dtypes a checkpoint may hold, by the safetensors format's names."""

# Exponent bits: all of them set is inf or NaN, whatever the mantissa.
_EXPONENTS: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "F64": (np.uint64, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7F80_0000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F8_E4M3": (np.uint8, 0x7F),  # no inf, and one NaN: all bits but the sign
    "F8_E5M2": (np.uint8, 0x7C),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: bytes `start` to `end` of `file`."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.start


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors that a safetensors file says it holds.

    Reads the header only. Raises ModelError naming file and tensor for everything
    that is not exactly as the format wants it, and for the dtypes of other schemes
    than FP8.
    """
    try:
        content = _header_bytes(path)
        header = strict_json(content)
        _check_metadata(header.pop("__metadata__", {}))
        base = 8 + len(content)
        tensors = {
            name: _tensor(name, entry, path.name, base)
            for name, entry in header.items()
        }
        _must_cover(tensors, base, path.stat().st_size)
    except ValueError as error:
        raise ModelError(f"{path.name} is refused: {error}") from None
    return tensors


def _header_bytes(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 10 or 8 + length > size:
            raise ValueError(
                f"truncated: {size} bytes, its header alone should have {length}"
            )
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes, limit {MAX_HEADER_BYTES}")
        content = file.read(length)
    if not content.startswith(b"{"):
        raise ValueError("the header does not begin with {")
    # One brace a tensor, two around them: counting first spares parsing seconds.
    if (objects := content.count(b"{")) > MAX_TENSORS + 2:
        raise ValueError(f"{objects} objects, the limit is {MAX_TENSORS} tensors")
    return content


def strict_json(content: bytes) -> dict[str, Any]:
    """Parse a JSON object in which no key comes twice. Raises ValueError."""
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=_distinct)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Two readers may each take another of two equal keys: the classic smuggling."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name[:80]!r} comes twice")
        found[name] = value
    return found


def _check_metadata(metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise ValueError("__metadata__ may hold nothing but strings")


def _tensor(name: str, entry: object, file: str, base: int) -> StoredTensor:
    label = repr(name[:80])
    if not (0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable()):
        raise ValueError(f"tensor name {label} is empty, too long or not printable")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {label} needs dtype, shape and data_offsets only")
    dtype = _dtype(entry["dtype"], label)
    shape = _counts(entry["shape"], f"shape of {label}")
    offsets = _counts(entry["data_offsets"], f"data_offsets of {label}")
    if len(shape) > MAX_RANK or math.prod(shape) > MAX_ELEMENTS:
        raise ValueError(f"tensor {label} has an impossible shape")
    if len(offsets) != 2:
        raise ValueError(f"data_offsets of {label} are not two numbers")
    start, end = offsets
    if end - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(
            f"tensor {label} of {dtype}{list(shape)} has {end - start} bytes"
        )
    return StoredTensor(dtype, shape, file, base + start, base + end)


def _dtype(dtype: object, label: str) -> str:
    if isinstance(dtype, str) and dtype in ITEM_BYTES:
        return dtype
    if isinstance(dtype, str) and dtype.startswith(("F8_", "F6_", "F4")):
        raise ValueError(
            f"tensor {label} is {dtype[:16]}: of models that are already quantized "
            "only F8_E4M3 and F8_E5M2 are read; give the model it was made from"
        )
    raise ValueError(f"tensor {label} has the unknown dtype {str(dtype)[:16]!r}")


def _counts(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_RANK:
        raise ValueError(f"{where} is not a list of at most {MAX_RANK} numbers")
    if not all(type(n) is int and 0 <= n <= 8 * MAX_ELEMENTS for n in value):
        raise ValueError(f"{where} has something else than counts in it")
    return tuple(value)


def _must_cover(tensors: Mapping[str, StoredTensor], base: int, size: int) -> None:
    """Raise where tensors overlap, leave a hole or end elsewhere than the file."""
    reached = base
    for name, tensor in sorted(
        tensors.items(), key=lambda item: (item[1].start, item[1].end)
    ):
        if tensor.start != reached:
            what = "overlaps another" if tensor.start < reached else "follows a hole"
            raise ValueError(f"tensor {name[:80]!r} {what}")
        reached = tensor.end
    if reached != size:
        what = "truncated" if reached > size else "bytes after the last tensor"
        raise ValueError(
            f"{what}: the header describes {reached} bytes, there are {size}"
        )


def refuse_non_finite(folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise NonFiniteError, naming tensor and file, at the first inf or NaN.

    Streams: CHUNK_BYTES at a time, whatever the size of the model. Integers pass.
    """
    for name, tensor in sorted(tensors.items(), key=lambda t: (t[1].file, t[1].start)):
        if tensor.dtype not in _EXPONENTS:
            continue
        kind, exponent = _EXPONENTS[tensor.dtype]
        mask = kind(exponent)
        for bits in _chunks(folder / tensor.file, tensor, kind):
            # The largest of the masked values is the mask itself only for inf or NaN.
            if np.bitwise_and(bits, mask, out=bits).max() == mask:
                raise NonFiniteError(f"tensor {name} of {tensor.file}")


def same_bytes(folder: Path, one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors are stored alike: dtype, shape and every byte."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    pairs = (_chunks(folder / t.file, t, np.uint8) for t in (one, other))
    return all(np.array_equal(a, b) for a, b in zip(*pairs, strict=True))


def _chunks(
    path: Path, tensor: StoredTensor, kind: type[np.unsignedinteger[Any]]
) -> Iterator[NDArray[Any]]:
    left = tensor.stored_bytes // np.dtype(kind).itemsize
    step = CHUNK_BYTES // np.dtype(kind).itemsize
    with path.open("rb") as file:
        file.seek(tensor.start, os.SEEK_SET)
        while left:
            bits = np.fromfile(file, dtype=kind, count=min(step, left))
            if not bits.size:
                raise ModelError(f"{path.name} became shorter while it was read")
            left -= bits.size
            yield bits
