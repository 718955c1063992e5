"""Keeps what a native library prints off the standard output.

HiGHS announces some repairs on stdout whatever its options say, and stdout may be
somebody's JSON. The file descriptor is turned away for the length of a call; lines
that are not the library's are passed on afterwards, so that other threads lose none.
"""

import ctypes
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.Lock()
_STDOUT = 1


@contextmanager
def stdout_without(marker: bytes) -> Iterator[None]:
    """Drop the lines with `marker` that anything in this process writes to stdout."""
    flush = ctypes.CDLL(None).fflush
    with _LOCK, tempfile.TemporaryFile() as held:
        flush(None)
        real = os.dup(_STDOUT)
        os.dup2(held.fileno(), _STDOUT)
        try:
            yield
        finally:
            flush(None)  # C keeps lines of its own until its buffer is full
            os.dup2(real, _STDOUT)
            held.seek(0)
            for line in held:
                if marker not in line:
                    os.write(real, line)
            os.close(real)
