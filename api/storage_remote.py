"""A bucket as the storage, through fsspec: `s3://bucket/prefix`, or what it also knows.

Who may enter is what the protocol's own client reads from the environment
(`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, …), so that no secret is a setting of ours.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec

from api.storage import CHUNK_BYTES, StorageUnavailable


class Remote:
    """Objects below a prefix. One appears when its last byte has arrived."""

    def __init__(self, url: str) -> None:
        with _answering(url):
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        self._root = root.rstrip("/")

    def write(self, key: str, content: bytes) -> None:
        """Store bytes, whole or not at all."""
        with _answering(key):
            self._fs.pipe_file(self._path(key), content)

    def put(self, key: str, source: Path) -> None:
        """Store a file in parts; it appears when all have arrived."""
        with _answering(key):
            self._fs.put_file(str(source), self._path(key))

    def take(self, key: str, source: Path) -> None:
        """Do as `put`: what lies elsewhere cannot be moved here."""
        self.put(key, source)

    def read(self, key: str) -> bytes:
        """Return all bytes."""
        with _answering(key):
            return bytes(self._fs.cat_file(self._path(key)))

    def chunks(self, key: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes from `start` up to `stop`, some at a time."""
        while start < stop:
            end = min(start + CHUNK_BYTES, stop)
            with _answering(key):
                chunk = bytes(self._fs.cat_file(self._path(key), start=start, end=end))
            yield chunk
            start = end

    def size(self, key: str) -> int:
        """Return the number of bytes."""
        with _answering(key):
            return int(self._fs.size(self._path(key)))

    def remove(self, key: str) -> None:
        """Delete an object, or all below a prefix. Absence is no error."""
        with _answering(key):
            try:
                self._fs.rm(self._path(key), recursive=True)
            except FileNotFoundError:
                return

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"


@contextmanager
def _answering(what: str) -> Iterator[None]:
    """Turn whatever a client raises into the two things that callers know."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:  # each client has a tree of its own
        name = type(error).__name__
        raise StorageUnavailable(f"{what}: the storage failed: {name}") from error
