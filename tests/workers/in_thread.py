"""The computing process as a thread: both ends of the real pipes, without the walls.

So a test may put a function in the place of the numerics, and look at what it did.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from api import settings
from workers import child, relay
from workers.channel import Channel
from workers.workdir import Workdir


@dataclass
class Process:
    """What `relay.running` gives, of a thread."""

    channel: Channel
    pid: int = os.getpid()

    def ending(self) -> Exception:
        return relay.Crashed("the thread ended")


@contextmanager
def running(workdir: Workdir) -> Iterator[Process]:
    reads, answers = os.pipe()
    hears, says = os.pipe()
    inside = Channel(reads, says, trusting=True)

    def serve() -> None:
        child.serve(inside)
        inside.close()

    thread = threading.Thread(target=serve, name="computing")
    thread.start()
    outside = Channel(hears, answers)
    try:
        yield Process(outside)
    finally:
        outside.close()  # as a process that is killed, it hears and says no more
        thread.join()


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in threads from now on."""
    monkeypatch.setenv("PRECISION_SANDBOX", "off")
    settings.settings.cache_clear()
    monkeypatch.setattr(relay, "running", running)
