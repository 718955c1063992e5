"""What is asked for at the same moment is written together.

SQLite has one writer, whose every commit waits for the disk, and threads that take turns
at it, and at the interpreter, cost a request more than its statements do. So there one
thread looks at all the requests that wait, and writes them in one transaction. One that
is refused while it is written takes no other down: all is undone, and each is written by
itself. PostgreSQL answers from afar, and has many writers: there each has a thread.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from api import db

T = TypeVar("T")
Act = Callable[[Session], T]  # writes
Look = Callable[[Session], Act[T]]  # checks, which may take a while: it holds no lock

TOGETHER = 32  # requests in one transaction, on SQLite
SLOW_S = 0.2  # who is looking at weights for longer does not hold up who comes later
THREADS = 8


class Crew(Generic[T]):
    """Does what requests ask for, in few threads."""

    def __init__(self, together: int, patience_s: float) -> None:
        """Take how many have one transaction, and after how long another thread helps."""
        self._together = together
        self._patience_s = patience_s
        self._limiter = CapacityLimiter(THREADS)
        self._waiting: deque[tuple[Look[T], asyncio.Future[T]]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps none
        self._busy = 0  # of them, those that will look again for who waits
        self._began = 0.0  # when a thread last took something up

    async def do(self, look: Look[T]) -> T:
        """Look, then write. Raises what either raises."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((look, future))
        late = time.monotonic() - self._began >= self._patience_s
        if not self._busy or (late and self._busy < THREADS):
            self._busy += 1
            task = asyncio.create_task(self._serve())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    async def _serve(self) -> None:
        try:
            while self._waiting:
                await self._take()
        finally:
            self._busy -= 1

    async def _take(self) -> None:
        count = min(len(self._waiting), self._together)
        taken = [self._waiting.popleft() for _ in range(count)]
        self._began = time.monotonic()
        looks = [look for look, _ in taken]
        try:
            done = await run_sync(together, looks, limiter=self._limiter)
        except Exception as error:  # whoever waits must hear of it
            done = [error] * len(taken)
        for (_, future), came in zip(taken, done, strict=True):
            _tell(future, came)


def for_database(url: str) -> Crew[Any]:
    """Return the crew that suits a database."""
    return Crew(TOGETHER, SLOW_S) if url.startswith("sqlite") else Crew(1, 0.0)


def alone(look: Look[T]) -> T:
    """Look, then write, in this thread. Raises what either raises."""
    [came] = together([look])
    if isinstance(came, Exception):
        raise came
    return came


def together(looks: Sequence[Look[T]]) -> list[T | Exception]:
    """Return what came of each: the writes are in one transaction where all succeed."""
    with db.glancing() as session:
        acts = [_tried(look, session) for look in looks]
        good = [act for act in acts if not isinstance(act, Exception)]
        written = iter(_written(session, good) if good else [])
        return [act if isinstance(act, Exception) else next(written) for act in acts]


def _tried(look: Look[T], session: Session) -> Act[T] | Exception:
    try:
        return look(session)
    except Exception as error:
        session.rollback()  # what the database refused would be in the next one's way
        return error


def _written(session: Session, acts: Sequence[Act[T]]) -> list[T | Exception]:
    try:
        with db.writing(session):
            return [act(session) for act in acts]
    except OperationalError as error:  # no fault of theirs, and it took long
        return [error] * len(acts)
    except Exception as error:
        if len(acts) == 1:
            return [error]
    return [came for act in acts for came in _written(session, [act])]


def _tell(future: asyncio.Future[T], came: T | Exception) -> None:
    if future.done():  # whoever asked is gone
        return
    if isinstance(came, Exception):
        future.set_exception(came)
    else:
        future.set_result(came)
