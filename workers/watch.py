"""What a computing process and all that it started take; and their end."""

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

EVERY_S = 0.5  # between two looks, which take 2 ms
PROCESSES = 128  # more than any library starts
END_S = 5.0  # to be gone after SIGKILL


class OutOfMemory(Exception):
    """The computing process took more than it may, or the kernel ended it."""


class TooMany(Exception):
    """The computing process started a great many others."""


@dataclass(slots=True)
class Watch:
    """Looks at a process and its descendants now and then."""

    pid: int
    memory_bytes: int  # 0: no limit
    _looked_at: float = 0.0

    def look(self) -> None:
        """Raise OutOfMemory or TooMany where it goes beyond what it may."""
        now = time.monotonic()
        if now - self._looked_at < EVERY_S:
            return
        self._looked_at = now
        family = descendants(self.pid)
        if len(family) > PROCESSES:
            raise TooMany(f"it runs {len(family)} processes")
        held = sum(held_bytes(pid) for pid in (self.pid, *family))
        if self.memory_bytes and held > self.memory_bytes:
            raise OutOfMemory(f"{held} bytes are more than {self.memory_bytes}")


def descendants(pid: int) -> list[int]:
    """Return what a process started, and what left that family but not the session."""
    try:
        found = {p.pid for p in psutil.Process(pid).children(recursive=True)}
    except psutil.NoSuchProcess:
        found = set()
    return sorted(found | set(_of_session(pid)) - {pid})


def _of_session(leader: int) -> list[int]:
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.getsid(pid) == leader:
                found.append(pid)
    return found


def held_bytes(pid: int) -> int:
    """Return the memory that nobody else could use: what files back is not counted.

    0 where the process has gone, and where the system is not Linux.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    pages = (fields.get(name, "0 kB") for name in ("RssAnon", "RssShmem"))
    return sum(1024 * int(kilobytes.split()[0]) for kilobytes in pages)


def end(pid: int, *, reaped: bool = False) -> None:
    """Kill a process and all that it started, again and again until nothing is left.

    `reaped`: the process itself is gone, and its number may be another's by now.
    """
    last = time.monotonic() + END_S
    while time.monotonic() < last:
        # First: those of a dead one are nobody's.
        family = _of_session(pid) if reaped else descendants(pid)
        for each in family if reaped else (pid, *family):
            with contextlib.suppress(OSError):
                os.kill(each, signal.SIGKILL)
        if not [each for each in family if _lives(each)]:
            return


def _lives(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False
