"""Artifacts on disk: one folder per job and attempt, files put whole or not at all."""

import hashlib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from api.settings import settings

NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,127}")
MEDIA_TYPES = {
    ".json": "application/json",
    ".html": "text/html; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class Stored:
    """A file that lies in the storage, and what is in it."""

    name: str
    sha256: str
    bytes: int
    media_type: str


def path(job_id: str, attempt: int, name: str) -> Path:
    """Return where an artifact lives. Raises ValueError if `name` is a path."""
    if not NAME.fullmatch(name):
        raise ValueError(f"not an artifact name: {name!r}")
    return settings().data_dir / "artifacts" / job_id / str(attempt) / name


def put(job_id: str, attempt: int, name: str, content: bytes) -> Stored:
    """Store an artifact. It is nobody's until `jobs.succeed` publishes it."""
    target = path(job_id, attempt, name)
    write(target, content)
    return Stored(
        name=name,
        sha256=hashlib.sha256(content).hexdigest(),
        bytes=len(content),
        media_type=MEDIA_TYPES.get(target.suffix, "application/octet-stream"),
    )


def write(target: Path, content: bytes) -> None:
    """Write a file whole or not at all, even if the power fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        with partial.open("xb") as file:
            file.write(content)
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
