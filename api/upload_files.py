"""The bytes of uploads on disk: parts come in, files are made of them.

`uploads/<id>/parts` has the parts, named by number and sha256, so that the row says
which one counts; `uploads/<id>/files` is what they become.
"""

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from starlette.concurrency import run_in_threadpool

from api import ids
from api.errors import BodyTooLarge
from api.part_plan import Files, parts
from api.settings import settings
from api.upload_errors import StorageFull

BLOCK_BYTES = 1 << 20
STRAY_S = 86_400.0
Consumer = Callable[[bytes], object]
ID = re.compile(rf"(mdl|ds)_{ids.PATTERN}")


def folder(upload_id: str) -> Path:
    """Return where an upload's bytes are. Raises ValueError for what is no id."""
    if not ID.fullmatch(upload_id):
        raise ValueError(f"not an upload's id: {upload_id!r}")
    return settings().data_dir / "uploads" / upload_id


def model_folder(tenant_id: str, model_id: str) -> Path:
    """Return where an uploaded model lives."""
    if not ID.fullmatch(model_id):
        raise ValueError(f"not a model's id: {model_id!r}")
    return settings().data_dir / "tenants" / tenant_id / "models" / model_id


def part_file(upload_id: str, number: int, sha256: str) -> Path:
    """Return where a part lies."""
    return folder(upload_id) / "parts" / f"{number}-{sha256}"


@dataclass(frozen=True, slots=True)
class Came:
    """A body that came whole: a file that is nobody's yet."""

    path: Path
    sha256: str
    bytes: int


async def receive(stream: AsyncIterator[bytes], target: Path, limit: int) -> Came:
    """Write a body to a new, durable file in the folder `target`.

    Raises BodyTooLarge and StorageFull, and leaves no file where anything goes wrong:
    a connection that is lost, or a client that falls silent.
    """
    target.mkdir(parents=True, exist_ok=True)
    partial = target / f".{secrets.token_hex(16)}.part"
    whole, size = hashlib.sha256(), 0
    try:
        with room(), partial.open("xb") as file:
            async for block in _blocks(stream):
                size += len(block)
                if size > limit:
                    raise BodyTooLarge(limit)
                await run_in_threadpool(_take, file.write, whole.update, block)
            file.flush()
            await run_in_threadpool(os.fsync, file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return Came(partial, whole.hexdigest(), size)


@contextmanager
def room() -> Iterator[None]:
    """Raise StorageFull where the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise StorageFull("the service's disk is full; tell the operator") from error


def _take(write: Consumer, update: Consumer, block: bytes) -> None:
    write(block)
    update(block)


async def _blocks(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield larger pieces of a body, so that threads are changed less often."""
    held = bytearray()
    async for some in stream:
        held += some
        if len(held) >= BLOCK_BYTES:
            yield bytes(held)
            held.clear()
    yield bytes(held)


def assemble(
    upload_id: str, planned: Files, part_bytes: int, digests: Mapping[int, str]
) -> Path:
    """Make files of the parts, and return their folder.

    Each part goes once its bytes are safe in their file, so that the disk never holds
    the whole twice, and who was interrupted may start again.
    """
    target = folder(upload_id) / "files"
    target.mkdir(parents=True, exist_ok=True)
    for part in parts(planned, part_bytes):
        source = part_file(upload_id, part.number, digests.get(part.number, ""))
        if source.exists():
            _put(source, target / part.path, part.offset)
            source.unlink()
    for file in planned:
        if (size := (target / file["path"]).stat().st_size) != file["bytes"]:
            raise OSError(f"{file['path']} has {size} bytes instead of {file['bytes']}")
    return target


def _put(source: Path, target: Path, offset: int) -> None:
    target.touch()
    with source.open("rb") as part, target.open("r+b") as file:
        file.seek(offset)
        shutil.copyfileobj(part, file, BLOCK_BYTES)
        file.flush()
        os.fsync(file.fileno())


def publish(files: Path, target: Path) -> None:
    """Move a folder to where it will live, whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    files.replace(target)
    handle = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(handle)  # a rename is durable once its folder is
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """Return the digest of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(upload_id: str) -> Iterator[bool]:
    """Be the only one at an upload, of all processes. False: somebody else is.

    The lock goes with the process that holds it, however that ends.
    """
    target = folder(upload_id)
    target.mkdir(parents=True, exist_ok=True)
    with (target / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def remove(upload_id: str) -> None:
    """Delete an upload's bytes. Harmless where there are none."""
    shutil.rmtree(folder(upload_id), ignore_errors=True)


def remove_strays(known: Collection[str]) -> None:
    """Delete folders of no upload, which who was killed in between left."""
    for path in (settings().data_dir / "uploads").glob("*_*"):
        old = time.time() - path.stat().st_mtime > STRAY_S
        if path.name not in known and old and ID.fullmatch(path.name):
            remove(path.name)


def free_bytes() -> int:
    """Return the free disk where uploads lie."""
    return shutil.disk_usage(settings().data_dir).free
