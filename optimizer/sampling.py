"""A dataset of any size, checked line by line; of a large one, a sample is kept.

Which lines those are is decided by their text alone, so that the same lines in another
order give the same sample: the ones whose sha256 is smallest, as many as fit.
"""

import hashlib
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from optimizer import datasets
from optimizer.errors import DatasetError

MAX_KEPT_BYTES = 64 << 20  # hundreds of times what a job reads of it
MAX_KEPT_LINES = datasets.MAX_LINES


@dataclass(frozen=True, slots=True)
class Kept:
    """What jobs will read: `sha256` and `bytes` are of it, not of what was sent."""

    sha256: str
    samples: int
    bytes: int
    samples_read: int  # distinct or not


def keep(file: Path, kept: Path) -> Kept:
    """Check every line of `file`; write those that are kept, in their order, to `kept`.

    Raises DatasetError naming the line, or where fewer than two samples are left.
    """
    sample, read = _Sample(), 0
    with file.open("rb") as lines:
        for number, offset, line in _lines(lines):
            text = datasets.document(line, number)
            read += 1
            if text is not None and text.strip():
                sample.offer(hashlib.sha256(text.encode()).digest(), offset, len(line))
        if len(sample.places) < 2:
            raise DatasetError(
                f"{len(sample.places)} of {read} samples survived: blank ones and "
                "repeated ones do not count. Give at least two different samples with "
                "text, one JSON object a line"
            )
        sha256, size = _copy(lines, sorted(sample.places.values()), kept)
    return Kept(sha256, len(sample.places), size, read)


@dataclass
class _Sample:
    """The lines with the smallest digests so far, and where they lie."""

    places: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    _largest: list[tuple[int, bytes]] = field(default_factory=list)  # a heap
    _bytes: int = 0
    _limit: bytes | None = None  # the smallest digest that did not fit

    def offer(self, digest: bytes, offset: int, length: int) -> None:
        """Take a line unless it is there already, or has no room."""
        if digest in self.places or (self._limit and digest >= self._limit):
            return
        self.places[digest] = offset, length
        heapq.heappush(self._largest, (-int.from_bytes(digest, "big"), digest))
        self._bytes += length + 1
        while self._bytes > MAX_KEPT_BYTES or len(self.places) > MAX_KEPT_LINES:
            _, self._limit = heapq.heappop(self._largest)
            self._bytes -= self.places.pop(self._limit)[1] + 1


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Yield the number, the place and the text of each line that is not blank."""
    number, offset = 0, 0
    while piece := file.readline(datasets.MAX_LINE_BYTES + 2):
        for line in piece.splitlines(keepends=True):
            number += 1
            if line.strip():
                yield number, offset, line.rstrip(b"\r\n")
            offset += len(line)


def _copy(file: BinaryIO, places: list[tuple[int, int]], kept: Path) -> tuple[str, int]:
    """Write the lines at these places; return the sha256 and the size of it all."""
    whole, size = hashlib.sha256(), 0
    with kept.open("xb") as target:
        for offset, length in places:
            file.seek(offset)
            line = file.read(length) + b"\n"
            target.write(line)
            whole.update(line)
            size += len(line)
    return whole.hexdigest(), size
