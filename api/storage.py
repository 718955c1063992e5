"""Where files lie: the data folder, or a bucket that speaks S3. Whole or not at all.

A key is a path inside the storage, as `artifacts/job_…/1/report.json`. Artifacts of an
attempt have a folder of their own, and are nobody's until `jobs.succeed` publishes them.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO, Protocol

from api.settings import settings

PART = r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,127}"
NAME = re.compile(PART)
ARTIFACT = re.compile(rf"{PART}(/{PART}){{0,3}}")  # `checkpoint/config.json`
CHUNK_BYTES = 2**20
MEDIA_TYPES = {
    ".json": "application/json",
    ".html": "text/html; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
    ".md": "text/markdown; charset=utf-8",
    ".csv": "text/csv; charset=utf-8",
    ".py": "text/x-python; charset=utf-8",
    ".pdf": "application/pdf",
    ".yaml": "application/yaml",
}


class StorageUnavailable(OSError):
    """The storage does not answer, or refuses; the same call may work in a moment."""


class Store(Protocol):
    """What a storage does. A key that is not there: FileNotFoundError."""

    def write(self, key: str, content: bytes) -> None:
        """Store bytes, whole or not at all."""

    def put(self, key: str, source: Path) -> None:
        """Store a file, whole or not at all, without holding it in memory."""

    def take(self, key: str, source: Path) -> None:
        """Store a file that nobody else has, whole or not at all; it may be moved."""

    def read(self, key: str) -> bytes:
        """Return all bytes."""

    def chunks(self, key: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes from `start` up to `stop`, some at a time."""

    def size(self, key: str) -> int:
        """Return the number of bytes."""

    def remove(self, key: str) -> None:
        """Delete a file, or a folder with all that is in it. Absence is no error."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A file that lies in the storage, and what is in it."""

    name: str
    sha256: str
    bytes: int
    media_type: str
    kind: str = "file"


@cache
def store() -> Store:
    """Return the storage of this process, as the settings say."""
    url = settings().storage_url
    if not url:
        return Local(settings().data_dir)
    from api.storage_remote import Remote  # fsspec, and what speaks the protocol

    return Remote(url)


# -- artifacts -------------------------------------------------------------------


def key(job_id: str, attempt: int, name: str) -> str:
    """Return where an artifact lives. Raises ValueError if `name` leads elsewhere."""
    if not ARTIFACT.fullmatch(name):
        raise ValueError(f"not an artifact name: {name!r}")
    return f"artifacts/{job_id}/{attempt}/{name}"


def put(
    job_id: str, attempt: int, name: str, content: bytes, kind: str = "file"
) -> Stored:
    """Store an artifact. It is nobody's until `jobs.succeed` publishes it."""
    store().write(key(job_id, attempt, name), content)
    digest = hashlib.sha256(content).hexdigest()
    return Stored(name, digest, len(content), media_type(name), kind)


def put_file(
    job_id: str, attempt: int, name: str, source: Path, kind: str = "file"
) -> Stored:
    """Store a file that nobody else has as an artifact; see `put`. It may be moved."""
    place = key(job_id, attempt, name)
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    size = source.stat().st_size
    store().take(place, source)
    return Stored(name, digest, size, media_type(name), kind)


def remove_job(job_id: str) -> None:
    """Delete the bytes of all artifacts of a job, also of attempts that were lost."""
    if not NAME.fullmatch(job_id):
        raise ValueError(f"not a job: {job_id!r}")
    store().remove(f"artifacts/{job_id}")


def media_type(name: str) -> str:
    """Return what a file of this name holds."""
    return MEDIA_TYPES.get(Path(name).suffix, "application/octet-stream")


# -- a folder --------------------------------------------------------------------


class Local:
    """Files below a folder. A rename makes them appear, once they are on the disk."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, key: str) -> Path:
        """Return the file of a key."""
        return self._root / key

    def write(self, key: str, content: bytes) -> None:
        """Store bytes, whole or not at all."""
        write(self.path(key), content)

    def put(self, key: str, source: Path) -> None:
        """Store a copy of a file, whole or not at all."""
        target = self.path(key)
        with source.open("rb") as file, _appearing(target) as partial:
            shutil.copyfileobj(file, partial, CHUNK_BYTES)

    def take(self, key: str, source: Path) -> None:
        """Move a file, which keeps its bytes, or copy it from another file system."""
        target = self.path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as file:
            os.fchown(file.fileno(), os.geteuid(), os.getegid())
            os.fchmod(file.fileno(), target.parent.stat().st_mode & 0o666)
            os.fsync(file.fileno())
        try:
            source.replace(target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self.put(key, source)
        _sync(target.parent)

    def read(self, key: str) -> bytes:
        """Return all bytes."""
        return self.path(key).read_bytes()

    def chunks(self, key: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes from `start` up to `stop`, some at a time."""
        with self.path(key).open("rb") as file:
            file.seek(start)
            while start < stop and (chunk := file.read(min(CHUNK_BYTES, stop - start))):
                start += len(chunk)
                yield chunk

    def size(self, key: str) -> int:
        """Return the number of bytes."""
        return self.path(key).stat().st_size

    def remove(self, key: str) -> None:
        """Delete a file, or a folder with all that is in it."""
        path = self.path(key)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def write(target: Path, content: bytes) -> None:
    """Write a file whole or not at all, even if the power fails."""
    with _appearing(target) as partial:
        partial.write(content)


@contextmanager
def _appearing(target: Path) -> Iterator[BinaryIO]:
    """Give a file to write to, which is there under its name once it is whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    name = f".{target.name[:64]}.{secrets.token_hex(4)}.part"
    partial = target.with_name(name)
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    _sync(target.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)  # a rename is durable once its folder is
    finally:
        os.close(handle)
