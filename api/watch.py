"""Who waits for jobs to change: streams and long polls, hundreds in one process.

One query per tick looks at every job that somebody waits for. Who waits holds a
future, and neither a thread nor a connection.
"""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import structlog
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from api import db, owners
from api.owners import Mark
from api.settings import settings

SIGNALS = (signal.SIGTERM, signal.SIGINT)

log = structlog.get_logger()


class Watcher:
    """Wakes who waits. It looks only while somebody does."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[asyncio.Future[bool], Mark]] = {}
        self._looking: asyncio.Task[None] | None = None
        self.closing = False

    async def changed(self, job_id: str, seen: Mark, patience_s: float) -> bool:
        """Return once the job is not as `seen`. False: patience, or we, ended."""
        if self.closing:
            return False
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(job_id, {})[future] = seen
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            async with asyncio.timeout(patience_s):
                return await future
        except TimeoutError:
            return False
        finally:
            self._leave(job_id, future)

    def close(self) -> None:
        """Wake all: the process ends, and open answers must."""
        self.closing = True
        for futures in self._waiting.values():
            for future in futures:
                if not future.done():
                    future.set_result(False)

    def _leave(self, job_id: str, future: asyncio.Future[bool]) -> None:
        futures = self._waiting.get(job_id, {})
        futures.pop(future, None)
        if not futures:
            self._waiting.pop(job_id, None)

    async def _look(self) -> None:
        while self._waiting:
            try:
                found = await run_in_threadpool(_marks, list(self._waiting))
            except SQLAlchemyError as error:  # it will be back; the streams live on
                log.warning("watch_failed", error=type(error).__name__)
            else:
                self._wake(found)
            await asyncio.sleep(settings().stream_poll_s)

    def _wake(self, found: dict[str, Mark]) -> None:
        for job_id, futures in self._waiting.items():
            for future, seen in futures.items():
                if found.get(job_id) != seen and not future.done():
                    future.set_result(True)


@contextmanager
def closed_on_signals(watcher: Watcher) -> Iterator[None]:
    """Close the watcher as soon as the process is told to stop.

    The server waits for open answers before it tells the application: too late. So
    its handlers are called by ours. Outside the main thread there are no signals.
    """
    loop = asyncio.get_running_loop()
    before: dict[signal.Signals, Any] = {}

    def stop(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(watcher.close)
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)

    try:
        for each in SIGNALS:
            before[each] = signal.getsignal(each)
            signal.signal(each, stop)
    except ValueError:
        before.clear()
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _marks(ids: list[str]) -> dict[str, Mark]:
    with db.reading() as session:
        return owners.marks(session, ids)
