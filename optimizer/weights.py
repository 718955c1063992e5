"""One safetensors file, read with suspicion and without the library.

A header can be 95 MB, name a tensor twice or overlap two of them, and the library
accepts some of that. Here it is refused from the header alone, before anything
allocates what it promises.
"""

import gc
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimizer import strict_json
from optimizer.errors import FormatError, HeaderError, ModelError, NonFiniteError

MAX_HEADER_BYTES = 25_000_000  # a model of 100,000 tensors needs 15 MB
MAX_TENSORS = 200_000
MAX_NAME_CHARACTERS = 512
MAX_RANK = 8
MAX_ELEMENTS = 1 << 48  # products beyond it could only come from a crafted header
MAX_COUNT = 8 * MAX_ELEMENTS
METADATA = "__metadata__"
MAX_METADATA_CHARACTERS = 1 << 20
MAX_METADATA_KEYS = 10_000
CHUNK_BYTES = 16 << 20

FIELDS = {"dtype", "shape", "data_offsets"}

# What may stand in a header, counted before it is parsed: what a crafted one promises,
# as a million lists in the place of a shape, is never held. A tensor is one object with
# two lists, ten quotes and at most eleven commas; names may have a few of their own.
_MOST = {
    b"{": ("objects", MAX_TENSORS + 2),
    b"[": ("lists", 3 * MAX_TENSORS),
    b'"': ("quotes", 10 * MAX_TENSORS + 4 * MAX_METADATA_KEYS + 2),
    b",": ("commas", 12 * MAX_TENSORS),
}
_DISGUISES = {  # how other kinds of files begin
    b"PK\x03\x04": "a zip archive, as torch.save writes it",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
    b"\x1f\x8b": "a gzip archive",
    b"GGUF": "a GGUF file",
    b"\x89HDF": "an HDF5 file",
    b"version https://git-lfs": "a Git LFS pointer: fetch the file it stands for",
}

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

    Reads the header only. Raises HeaderError naming file and tensor for everything
    that is not exactly as the format wants it, and for the dtypes of other schemes
    than FP8.
    """
    try:
        content = _header_bytes(path)
        with _uncollected():
            entries = strict_json.parse(content)
            _refuse_metadata(entries.pop(METADATA, {}))
            tensors = _tensors(entries, path.name, 8 + len(content))
            _must_cover(tensors, 8 + len(content), path.stat().st_size)
    except ValueError as error:
        raise HeaderError(f"{path.name} is refused: {error}") from None
    return tensors


@contextmanager
def _uncollected() -> Iterator[None]:
    """Let the collector rest: going through a million new lists again and again, none
    of which is garbage, takes it longer than it takes us to make and check them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _header_bytes(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(24)
        _refuse_disguised(path.name, first)
        length = int.from_bytes(first[:8], "little")
        if size < 10 or 8 + length > size:
            raise ValueError(
                f"truncated: {size} bytes, its header alone should have {length}"
            )
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes, limit {MAX_HEADER_BYTES}")
        file.seek(8)
        content = file.read(length)
    if not content.startswith(b"{"):
        raise ValueError("the header does not begin with {")
    for mark, (what, most) in _MOST.items():
        if (count := content.count(mark)) > most:
            raise ValueError(
                f"{count} {what}: {MAX_TENSORS} tensors, the limit, have fewer"
            )
    return content


def _refuse_disguised(name: str, first: bytes) -> None:
    """Raise for another kind of file under this name; nothing of it is opened."""
    for beginning, kind in _DISGUISES.items():
        if first.startswith(beginning):
            raise FormatError(f"{name} is refused: it is not safetensors but {kind}")


def _refuse_metadata(metadata: object) -> None:
    """Raise for metadata that are more than a few strings under names."""
    if not isinstance(metadata, dict):
        raise ValueError(f"{METADATA} may hold nothing but strings by name")
    if len(metadata) > MAX_METADATA_KEYS:
        raise ValueError(
            f"{METADATA} has {len(metadata)} keys, the limit is {MAX_METADATA_KEYS}"
        )
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{METADATA} may hold nothing but strings")
    length = sum(len(name) + len(value) for name, value in metadata.items())
    if length > MAX_METADATA_CHARACTERS:
        raise ValueError(
            f"{METADATA} has {length} characters, the limit is {MAX_METADATA_CHARACTERS}"
        )


def _tensors(
    entries: Mapping[str, Any], file: str, base: int
) -> dict[str, StoredTensor]:
    tensors = {}
    for name, entry in entries.items():
        try:
            tensors[name] = _checked(name, entry, file, base)
        except ValueError as error:
            raise ValueError(f"tensor {name[:80]!r} {error}") from None
    return tensors


def _checked(name: str, entry: Any, file: str, base: int) -> StoredTensor:
    if not (0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable()):
        raise ValueError("has a name that is empty, too long or not printable")
    if not isinstance(entry, dict) or entry.keys() != FIELDS:
        raise ValueError("needs dtype, shape and data_offsets only")
    dtype = _dtype(entry["dtype"])
    shape = _counts(entry["shape"], "a shape")
    offsets = _counts(entry["data_offsets"], "data_offsets")
    if len(shape) > MAX_RANK or (elements := math.prod(shape)) > MAX_ELEMENTS:
        raise ValueError("has an impossible shape")
    if len(offsets) != 2:
        raise ValueError("has data_offsets that are not two numbers")
    start, end = offsets
    if end - start != elements * ITEM_BYTES[dtype]:
        raise ValueError(f"of {dtype}{list(shape)} has {end - start} bytes")
    return StoredTensor(dtype, shape, file, base + start, base + end)


def _dtype(dtype: object) -> str:
    if isinstance(dtype, str) and dtype in ITEM_BYTES:
        return dtype
    if isinstance(dtype, str) and dtype.startswith(("F8_", "F6_", "F4")):
        raise ValueError(
            f"is {dtype[:16]}: of models that are already quantized "
            "only F8_E4M3 and F8_E5M2 are read; give the model it was made from"
        )
    raise ValueError(f"has the unknown dtype {str(dtype)[:16]!r}")


def _counts(value: object, what: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_RANK:
        raise ValueError(f"has {what} that is not a list of at most {MAX_RANK} numbers")
    for count in value:  # a generator takes twice as long
        if type(count) is not int or not 0 <= count <= MAX_COUNT:
            raise ValueError(f"has {what} with something else than counts in it")
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
