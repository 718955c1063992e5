"""Files of an export, written once from front to back, and known by their digest."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO

ALIGNED = 8  # bytes: where the first tensor of a safetensors file may begin
COPY_BYTES = 8 << 20
Write = Callable[[bytes | memoryview], None]


@dataclass(frozen=True, slots=True)
class Outlet:
    """Where exports go, and how much of the disk they may take."""

    folder: Path  # whatever lies in it at the end is the job's
    room_bytes: int | None = None  # None: all that is free
    vllm: Path | None = None  # the Python of an environment that has it


@dataclass(frozen=True, slots=True)
class Exported:
    """One file of an export."""

    name: str  # its path below the folder of all exports, with forward slashes
    kind: str  # checkpoint, module_plan, configuration, stack
    bytes: int
    sha256: str
    consumer: str  # what reads it: vllm, transformer_engine, torchao, precision


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to be written: what a safetensors header says of it."""

    name: str
    dtype: str  # by the format's names: BF16, F8_E4M3
    shape: tuple[int, ...]
    bytes: int


@dataclass(slots=True, eq=False)
class Target:
    """Where the files of one export go, and those that are written."""

    root: Path
    below: str  # of `root`: "checkpoint", or "" for none
    kind: str
    consumer: str
    written: list[Exported]

    @property
    def folder(self) -> Path:
        """The folder of the export, made if it is not there."""
        made = self.root / self.below
        made.mkdir(parents=True, exist_ok=True)
        return made

    @contextmanager
    def open(self, name: str) -> Iterator[Write]:
        """Give a function that appends to a new file; at the end it is written."""
        digest, count = hashlib.sha256(), 0
        with (self.folder / name).open("xb") as file:

            def write(some: bytes | memoryview) -> None:
                nonlocal count
                file.write(some)
                digest.update(some)
                count += memoryview(some).nbytes

            yield write
        path = f"{self.below}/{name}" if self.below else name
        self.written.append(
            Exported(path, self.kind, count, digest.hexdigest(), self.consumer)
        )

    def text(self, name: str, content: str) -> None:
        """Write a text file."""
        with self.open(name) as write:
            write(content.encode())

    def json(self, name: str, content: object) -> None:
        """Write a JSON file that people can read."""
        self.text(name, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def copy(self, source: Path) -> None:
        """Copy a file, byte by byte, under its own name."""
        with source.open("rb") as file, self.open(source.name) as write:
            copy(file, source.stat().st_size, write)


def copy(file: IO[bytes], count: int, write: Write) -> None:
    """Copy `count` bytes from where the file stands. Raises OSError where it ends."""
    while count:
        some = file.read(min(COPY_BYTES, count))
        if not some:
            raise OSError(f"{file.name} became shorter while it was read")
        write(some)
        count -= len(some)


def header(tensors: Iterable[Tensor]) -> bytes:
    """Return the head of a safetensors file with these tensors, in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.bytes],
        }
        start += tensor.bytes
    said = json.dumps(entries, separators=(",", ":")).encode()
    said += b" " * (-len(said) % ALIGNED)
    return len(said).to_bytes(8, "little") + said


def cut(sizes: Sequence[int], limit_bytes: int) -> list[slice]:
    """Cut things of these sizes, in order, into files of up to `limit_bytes`.

    What is larger than the limit has a file for itself.
    """
    starts, room = [0], limit_bytes
    for index, size in enumerate(sizes):
        if size > room and index > starts[-1]:
            starts.append(index)
            room = limit_bytes
        room -= size
    return [slice(a, b) for a, b in pairwise([*starts, len(sizes)])]


def shard_name(index: int, count: int) -> str:
    """Return the name that transformers gives a file of weights."""
    if count == 1:
        return "model.safetensors"
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
