"""Frames between a worker and the process that computes: JSON, and text after it.

    4 bytes        8 bytes        JSON       text
    length, JSON   length, text

Never pickle: what arrives may be from a process that a hostile model took over. So
both lengths have limits, and who waits looks up all the time.
"""

import os
import select
import struct
from collections.abc import Callable
from dataclasses import dataclass

JSON_BYTES = 32 * 2**20  # of a message without its text
TEXT_BYTES = 256 * 2**20  # of results, which are longer; what is more is not sent
LINE_CHARACTERS = 500  # of a job's log
CHUNK_BYTES = 2**20
LOOK_S = 0.2  # who waits looks up this often

_LENGTHS = struct.Struct(">IQ")


class Closed(Exception):
    """The other side is gone."""


class Garbled(Exception):
    """The other side does not keep to the protocol."""


def nothing() -> None:
    """Nobody looks up."""


@dataclass(slots=True)
class Channel:
    """Both directions, over two descriptors that are this object's own."""

    reader: int
    writer: int
    look: Callable[[], None] = nothing  # called while waiting; may raise to stop
    trusting: bool = False  # of the other side: messages may be of any length

    def __post_init__(self) -> None:
        for descriptor in (self.reader, self.writer):
            os.set_blocking(descriptor, False)

    def send(self, json: bytes, *texts: bytes) -> None:
        """Write a message. Raises Closed where nobody reads it any more."""
        length = sum(len(text) for text in texts)
        for part in (_LENGTHS.pack(len(json), length), json, *texts):
            self._write(part)

    def receive(self) -> tuple[bytes, bytes]:
        """Return the next message and its text. Raises Closed, and Garbled if too long."""
        json_bytes, text_bytes = _LENGTHS.unpack(self._read(_LENGTHS.size))
        too_long = json_bytes > JSON_BYTES or text_bytes > TEXT_BYTES
        if too_long and not self.trusting:
            raise Garbled(f"a message of {json_bytes} + {text_bytes} bytes")
        return self._read(json_bytes), self._read(text_bytes)

    def close(self) -> None:
        """Close both directions."""
        os.close(self.reader)
        os.close(self.writer)

    def _write(self, part: bytes) -> None:
        left = memoryview(part)
        while left:
            try:
                left = left[os.write(self.writer, left[:CHUNK_BYTES]) :]
            except BlockingIOError:
                self.look()
                select.select([], [self.writer], [], LOOK_S)
            except BrokenPipeError:
                raise Closed from None

    def _read(self, length: int) -> bytes:
        found = bytearray()  # grows with what arrives, not with what was announced
        while len(found) < length:
            self.look()
            if not select.select([self.reader], [], [], LOOK_S)[0]:
                continue
            part = os.read(self.reader, min(CHUNK_BYTES, length - len(found)))
            if not part:
                raise Closed
            found += part
        return bytes(found)
