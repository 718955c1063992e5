"""The folder of one computing process: made for it, locked while it is used, then gone.

What a killed worker left is taken away by the next one, which finds it unlocked.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from api.settings import settings


@dataclass(frozen=True, slots=True)
class Workdir:
    """Everything that a computing process may write."""

    root: Path

    @property
    def scratch(self) -> Path:
        """Its home and its place for temporary files."""
        return self.root / "tmp"

    @property
    def output(self) -> Path:
        """What lies here at the end is published."""
        return self.root / "out"


@contextmanager
def opened() -> Iterator[Workdir]:
    """Give a fresh folder, and take it away in the end."""
    parent = settings().data_dir / "work"
    parent.mkdir(parents=True, exist_ok=True)
    root = parent / secrets.token_hex(8)
    with _locked(parent):  # so that nobody takes it for one that was left
        _clean(parent)
        root.mkdir()
        lock = _lock(root)
    assert lock is not None
    try:
        made = Workdir(root)
        made.scratch.mkdir(mode=0o700)
        made.output.mkdir(mode=0o700)
        yield made
    finally:
        shutil.rmtree(root, ignore_errors=True)
        os.close(lock)


def _clean(parent: Path) -> None:
    for folder in parent.iterdir():
        lock = _lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _lock(folder: Path) -> int | None:
    """Lock a folder until the handle is closed. None: another process has it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle
