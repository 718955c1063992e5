"""A process that does what a pool's child does with one bell, and may die at a moment.

Everything is the product's own but the numerics. The processes are forked from one that
has it all imported, so that each is there at once.
"""

import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from api import db, jobs, pieces, queue, settings, storage
from tests.faults import numerics
from tests.workers import in_thread
from workers import outputs, relay, tasks

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.faults.worker", "sqlalchemy.dialects.sqlite"])
LIMIT_BYTES = 1000  # of a file, where the disk is full

Step = Callable[..., Any]


def die(*_: object, **__: object) -> None:
    """As `kill -9` does it, at this very place."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal is for the process; this may be one of its threads


def before(place: Any, name: str, nth: int = 1) -> None:
    """Die where the function is called for the n-th time."""
    _replace(place, name, nth, lambda real: die)


def after(place: Any, name: str, nth: int = 1) -> None:
    """Die where the function has returned; what it wrote is not committed."""
    _replace(place, name, nth, lambda real: lambda *a, **k: die(real(*a, **k)))


def full_disk(place: Any, name: str) -> None:
    """Leave room for nothing while the function runs."""

    def without_room(real: Step) -> Step:
        def call(*arguments: Any, **named: Any) -> Any:
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, hard))
            try:
                return real(*arguments, **named)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

        return call

    _replace(place, name, 1, without_room)


def _replace(place: Any, name: str, nth: int, change: Callable[[Step], Step]) -> None:
    real, calls = getattr(place, name), 0

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return (change(real) if calls == nth else real)(*arguments, **named)

    setattr(place, name, call)


MOMENTS: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "the claim is not committed": lambda: after(jobs, "claim_next"),
    "it is claimed": lambda: before(tasks, "_run"),
    "the first progress is not committed": lambda: after(jobs, "progress"),
    "the computing process asks for pieces": lambda: before(pieces, "add"),
    "a piece is claimed": lambda: after(pieces, "claim_own"),
    "a result is not committed": lambda: after(pieces, "finish", 2),
    "the results are read": lambda: before(pieces, "drop"),
    "everything is computed": lambda: before(tasks, "_finalize"),
    "the last stretch is not committed": lambda: after(jobs, "finalize"),
    "no file is stored": lambda: before(storage, "put_file"),
    "one file is stored": lambda: before(storage, "put_file", 2),
    "all files are stored": lambda: before(jobs, "succeed"),
    "the success is not committed": lambda: after(jobs, "succeed"),
    "it has succeeded": lambda: after(tasks, "_finalize"),
    "the disk is full": lambda: full_disk(outputs, "write"),
}
DEADLY = [name for name in MOMENTS if name not in ("", "the disk is full")]


def start(moment: str = "") -> BaseProcess:
    """Have a worker hear a bell."""
    process = CONTEXT.Process(target=_hear, args=(dict(os.environ), moment))
    process.start()
    return process


def finish(*processes: BaseProcess) -> list[int | None]:
    """Wait for workers, and return their exit codes."""
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]


def _hear(environment: dict[str, str], moment: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for cached in (settings.settings, queue.producer, storage.store):
        cached.cache_clear()
    db.close()
    numerics.stand_in()
    relay.running = in_thread.running  # type: ignore[assignment]
    queue.rings = lambda hardware: True  # type: ignore[assignment]  # nobody rings here
    MOMENTS[moment]()
    tasks.run_job("job_that_rang")
    db.close()
