"""Crafted safetensors files: each is refused within 2 s of CPU and 300 MB.

The first sixteen are a published list, which the safetensors library takes or takes
seconds and gigabytes to refuse; the others are aimed at this reader.
"""

import json
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from optimizer.errors import ModelError
from optimizer.weights import MAX_TENSORS, read_header


@dataclass(frozen=True)
class Sparse:
    """A file of which only the beginning takes disk."""

    beginning: bytes
    size: int


Make = Callable[[], bytes | Sparse]

LIMIT_S = 2.0  # of the processor
LIMIT_BYTES = 300 * 10**6

# Reads each file in a process of its own, and prints what it cost.
MEASURE = """
import json, os, sys, time
from pathlib import Path
from typing import Any
from optimizer.errors import ModelError
from optimizer.weights import read_header

for file in sys.argv[1:]:
    reader, writer = os.pipe()
    if not os.fork():
        try:
            said = str(len(read_header(Path(file)))) + " tensors"
        except ModelError as error:
            said = str(error)
        os.write(writer, said[:1000].encode())
        os._exit(0)
    os.close(writer)
    said = os.fdopen(reader, "rb").read().decode()
    _, status, used = os.wait4(-1, 0)
    seconds = used.ru_utime + used.ru_stime
    print(json.dumps([file, status, said, seconds, used.ru_maxrss * 1024]))
"""


def crafted(header: bytes, values: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + values


def tensor(name: str, shape: str, start: int, end: int, dtype: str = "U8") -> str:
    return (
        f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}}'
    )


def of(*tensors: str) -> bytes:
    return ("{" + ",".join(tensors) + "}").encode()


def many(count: int) -> str:
    return ",".join(tensor(str(i), "[0]", 0, 0) for i in range(count))


def sparse(length: int) -> Sparse:
    return Sparse(struct.pack("<Q", length) + b'{"__metadata__":{"a":"', 8 + length)


ONE = tensor("a", "[1]", 0, 1)
WORD = '"ab",'
LISTED: dict[str, Make] = {
    "length of 2^64-1": lambda: struct.pack("<Q", 2**64 - 1) + b"{}",
    "length of 2^63": lambda: struct.pack("<Q", 2**63) + b"{}",
    "length beyond the file": lambda: struct.pack("<Q", 1000) + b"{}",
    "bad JSON": lambda: crafted(b'{"a": nonsense}'),
    "a million levels": lambda: crafted(
        b'{"a":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"
    ),
    "overlap": lambda: crafted(of(ONE, tensor("b", "[1]", 0, 1)), b"\0"),
    "hole": lambda: crafted(of(ONE, tensor("b", "[1]", 2, 3)), b"\0" * 3),
    "trailing bytes": lambda: crafted(of(ONE), b"\0" * 2),
    "shape that overflows": lambda: crafted(of(tensor("a", f"[{2**63},2]", 0, 0))),
    "negative shape": lambda: crafted(of(tensor("a", "[-1]", 0, 1)), b"\0"),
    "metadata of numbers": lambda: crafted(b'{"__metadata__":{"a":1}}'),
    "one name twice": lambda: crafted(of(ONE, tensor("a", "[1]", 1, 2)), b"\0\0"),
    "shape of [0,2^62]": lambda: crafted(of(tensor("a", f"[0,{2**62}]", 0, 0))),
    "1.69 million tensors": lambda: sparse(95_000_000),
    "a rank of 40 million": lambda: sparse(80_000_000),
    "95 MB of metadata": lambda: sparse(95_000_000),
}
OWN: dict[str, Make] = {
    "a rank of 12 million": lambda: crafted(
        of(tensor("a", "[" + "1," * 12_000_000 + "1]", 0, 1))
    ),
    "5 million words as a shape": lambda: crafted(
        of(tensor("a", "[" + WORD * 4_900_000 + "1]", 0, 1))
    ),
    "8 million lists as a shape": lambda: crafted(
        of(tensor("a", "[" + "[]," * 8_000_000 + "1]", 0, 1))
    ),
    "1.5 million flat keys": lambda: crafted(
        of(*(f'"{i}":1' for i in range(1_500_000)))
    ),
    "a million flat keys": lambda: crafted(of(*(f'"{i}":1' for i in range(1_000_000)))),
    "2.4 million numbers as a shape": lambda: crafted(
        of(tensor("a", "[" + "123456789," * 2_390_000 + "1]", 0, 1))
    ),
    "four bytes for each of 20 million letters": lambda: crafted(
        of(tensor("\U0001f600" + "n" * 20_000_000, "[1]", 0, 1)), b"\0"
    ),
    "1.5 million keys of metadata": lambda: crafted(
        b'{"__metadata__":{'
        + b",".join(b'"%d":"x"' % i for i in range(1_500_000))
        + b"}}"
    ),
    "20 MB of metadata in one string": lambda: crafted(
        b'{"__metadata__":{"a":"' + b"x" * 20_000_000 + b'"}}'
    ),
    "metadata twice": lambda: crafted(b'{"__metadata__":{},"__metadata__":{}}'),
    "metadata within metadata": lambda: crafted(b'{"__metadata__":{"a":{"b":"c"}}}'),
    "the most tensors, and a byte too many": lambda: crafted(
        f"{{{many(MAX_TENSORS)}}}".encode(), b"x"
    ),
    "a tensor too many": lambda: crafted(f"{{{many(MAX_TENSORS + 2)}}}".encode()),
    "braces in a name": lambda: crafted(
        of(tensor("{" * 1_000_000, "[1]", 0, 1)), b"\0"
    ),
    "a name of 20 MB": lambda: crafted(
        of(tensor("n" * 20_000_000, "[1]", 0, 1)), b"\0"
    ),
    "20 MB of backslashes": lambda: crafted(b'{"' + b"\\" * 20_000_000),
    "20 MB of spaces": lambda: crafted(b'{"a"' + b" " * 20_000_000 + b"}"),
    "20 MB of commas": lambda: crafted(b"{" + b"," * 20_000_000 + b"}"),
    "one name, written in two ways": lambda: crafted(
        of(ONE, tensor("\\u0061", "[1]", 1, 2)), b"\0\0"
    ),
    "half of a surrogate pair": lambda: crafted(
        of(tensor("\\ud800", "[1]", 0, 1)), b"\0"
    ),
    "a zero byte in a name": lambda: crafted(of(tensor("a\0b", "[1]", 0, 1)), b"\0"),
    "UTF-16": lambda: crafted(
        "{".encode("utf-16-le") + of(ONE).decode().encode("utf-16-le"), b"\0"
    ),
    "a byte order mark": lambda: crafted(b"\xef\xbb\xbf" + of(ONE), b"\0"),
    "a number of 5,000 digits": lambda: crafted(
        of(tensor("a", f"[{'9' * 4000}]", 0, 1))
    ),
    "a shape with an exponent": lambda: crafted(of(tensor("a", "[1e0]", 0, 1)), b"\0"),
    "a shape of NaN": lambda: crafted(of(tensor("a", "[NaN]", 0, 1)), b"\0"),
    "offsets that go back": lambda: crafted(of(tensor("a", "[1]", 1, 0)), b"\0"),
    "a comma at the end": lambda: crafted(b"{" + ONE.encode() + b",}", b"\0"),
    "a second object": lambda: crafted(of(ONE) + of(ONE), b"\0"),
    "a pickle": lambda: pickle.dumps({"a": 1}) + b" " * 32,
    "a zip archive": lambda: b"PK\x03\x04" + b"\0" * 100,
    "GGUF": lambda: b"GGUF\x03\0\0\0" + b"\0" * 100,
    "a Git LFS pointer": lambda: (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    ),
    "zeros": lambda: b"\0" * 4096,
}
ALL = {**LISTED, **OWN}


def write(path: Path, content: bytes | Sparse) -> None:
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_bytes(content.beginning)
        os.truncate(path, content.size)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """Write every file, have each read, and return what that cost: the least of three.

    What a busy machine adds is not the reader's.
    """
    folder = tmp_path_factory.mktemp("crafted")
    paths = {}
    for kind, make in ALL.items():
        path = folder / f"{len(paths)}.safetensors"
        write(path, make())
        paths[str(path)] = kind
    asked = [sys.executable, "-c", MEASURE, *paths]
    root = Path(__file__).parents[2]
    rows: list[Any] = []
    for _ in range(3):
        done = subprocess.run(
            asked, cwd=root, capture_output=True, text=True, check=True
        )
        rows += [json.loads(line) for line in done.stdout.splitlines()]
    rows.sort(key=lambda row: row[3], reverse=True)  # the last one counts
    for path in paths:
        Path(path).unlink()
    return {paths[file]: [Path(file).name, *rest] for file, *rest in rows}


@pytest.mark.parametrize("kind", ALL)
def test_a_crafted_file_is_refused_at_once(
    measured: dict[str, list[object]], kind: str
) -> None:
    name, status, said, seconds, peak_bytes = measured[kind]
    assert status == 0
    assert str(said).startswith(f"{name} is refused: "), said
    assert float(str(seconds)) < LIMIT_S
    assert int(str(peak_bytes)) < LIMIT_BYTES


def test_there_are_sixteen_and_more() -> None:
    assert len(LISTED) == 16
    assert len(OWN) >= 10


@pytest.mark.parametrize("kind", ["a pickle", "a zip archive", "GGUF"])
def test_what_a_file_is_instead_is_said(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "model.safetensors", OWN[kind]())
    with pytest.raises(ModelError, match=f"it is not safetensors but .*{kind}"):
        read_header(tmp_path / "model.safetensors")


def test_the_most_tensors_that_may_be_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(crafted(f"{{{many(MAX_TENSORS)}}}".encode()))
    assert len(read_header(path)) == MAX_TENSORS
