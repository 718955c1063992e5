"""A job's sign of life, and its ear: heartbeats, progress, cancels, a lost claim.

One thread per job writes to the row, so that the job itself never waits for the
database, and a long kernel never silences it.
"""

import contextvars
import logging
import os
import select
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from api import jobs, pieces
from api.db import transaction
from api.jobs import Signal
from api.pieces import PieceClaim
from api.settings import settings
from api.transitions import Claim
from optimizer.errors import Cancelled

logger = logging.getLogger(__name__)

TICK_S = 0.5  # progress reaches the row at most this often
PATIENCE_S = 1.0  # the job looks up each second; a process is for one job, and may go


class Overdue(Exception):
    """The job runs longer than it may."""


class Progress(NamedTuple):
    """How far one phase got."""

    phase: str
    percent: float  # of the whole job
    eta_s: float | None
    trials: jobs.Trials = jobs.Trials()


class Pulse(ABC):
    """Beats as long as the `with` block runs. What it says, the subclasses know."""

    def __init__(
        self, job_id: str, *, leave: Callable[[int], object] = os._exit
    ) -> None:
        self._job_id = job_id
        self._leave = leave
        self.piece: PieceClaim | None = None  # what this process computes now
        self._told: dict[str, Progress] = {}  # the last word of each phase
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._signal = Signal.OK
        self._stop_at: float | None = None  # when patience with the job ends
        self._heard_at = time.monotonic()  # when the database last answered
        context = contextvars.copy_context()  # its log lines name the job, too
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name="beat", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        if isinstance(error, SystemExit):  # how the pool tells the main thread to stop
            self._give_back()

    def tell(self, progress: Progress) -> None:
        """Remember how far the job is. Raises Cancelled where it should stop."""
        self.check()
        with self._lock:
            self._told[progress.phase] = progress

    def check(self) -> None:
        """Raise Cancelled if the owner wants a stop or the claim is void."""
        if self._signal is not Signal.OK:
            raise Cancelled(f"the job was {self._signal}")

    def _run(self) -> None:
        beaten_at = time.monotonic()
        while not self._ended.is_set():
            if _stop.wait(TICK_S, self._ended):
                return self._give_back()
            told, now = self._take(), time.monotonic()
            if told or now - beaten_at >= settings().beat_s:
                self._write(told)
                beaten_at = now
            self._lose_patience(now)
        return None

    def _take(self) -> list[Progress]:
        with self._lock:
            told, self._told = self._told, {}
        return list(told.values())

    def _write(self, told: list[Progress]) -> None:
        try:
            with transaction() as session:
                heard = self._say(session, told)
            self._heard_at = time.monotonic()
        except SQLAlchemyError:
            # The lease outlives a short outage; after it, another may have the job.
            logger.warning("job %s: the beat failed", self._job_id, exc_info=True)
            silent_s = time.monotonic() - self._heard_at
            heard = Signal.LOST if silent_s > settings().lease_s else Signal.OK
        if heard is not Signal.OK and self._signal is Signal.OK:
            self._signal = heard
            self._stop_at = time.monotonic() + PATIENCE_S

    def _lose_patience(self, now: float) -> None:
        """End the process if the job did not stop by itself: a kernel that is long."""
        if self._stop_at is None or now < self._stop_at:
            return
        logger.warning("job %s did not stop by itself", self._job_id)
        try:
            with transaction() as session:
                self._abandon(session)
        finally:
            self._leave(1)

    def _give_back(self) -> None:
        """Let another worker have the job: this one was told to stop."""
        try:
            with transaction() as session:
                self._release(session)
        finally:
            self._leave(0)

    @abstractmethod
    def _say(self, session: Session, told: list[Progress]) -> Signal:
        """Beat, and return what the row says."""

    def _abandon(self, session: Session) -> None:  # noqa: B027  a helper has nothing
        """Write what is to be written where the job did not stop by itself."""

    def _release(self, session: Session) -> None:
        """Write what lets another worker go on at once."""
        if self.piece is not None:
            pieces.release(session, self.piece)


class Beat(Pulse):
    """Beats for the claim on a job, and for the piece that its worker computes."""

    def __init__(
        self, claim: Claim, *, leave: Callable[[int], object] = os._exit
    ) -> None:
        super().__init__(claim.job_id, leave=leave)
        self._claim = claim
        self._limit_s = claim.run_limit_s or settings().run_limit_s
        self._over_at = time.monotonic() + self._limit_s

    def check(self) -> None:
        """Raise Cancelled if it should stop, and Overdue if it took too long."""
        super().check()
        if time.monotonic() > self._over_at:
            raise Overdue(f"job {self._job_id} runs for {self._limit_s:g} s")

    def _say(self, session: Session, told: list[Progress]) -> Signal:
        # The job's row first, as wherever both are written: no two wait for each other.
        heard = Signal.OK if told else jobs.beat(session, self._claim)
        for last in told:
            heard = jobs.progress(session, self._claim, *last)
        if heard is Signal.OK and (piece := self.piece) is not None:
            pieces.beat(session, piece)  # where it is void, it is computed twice
        return heard

    def _abandon(self, session: Session) -> None:
        jobs.cancelled(session, self._claim)

    def _release(self, session: Session) -> None:
        if not jobs.release(session, self._claim):
            self._abandon(session)
        super()._release(session)


class HelpersBeat(Pulse):
    """Beats for the piece that a helper computes; the job is another worker's."""

    def _say(self, session: Session, told: list[Progress]) -> Signal:
        piece = self.piece
        if piece is None:
            return Signal.OK
        heard = pieces.beat(session, piece)
        # Another one by now: this one was finished while we asked.
        return heard if self.piece is piece else Signal.OK


class _Stop:
    """Whether SIGTERM came. The kernel writes to a pipe even while torch computes."""

    def __init__(self) -> None:
        self._reader: int | None = None  # None: nobody listens

    def listen(self) -> None:
        """Hear of signals from now on, whoever handles them. Main thread only."""
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def wait(self, seconds: float, ended: threading.Event) -> bool:
        """Sleep, or return True at once when SIGTERM comes."""
        if self._reader is None:
            ended.wait(seconds)
            return False
        ready, _, _ = select.select([self._reader], [], [], seconds)
        return bool(ready) and signal.SIGTERM in os.read(self._reader, 4096)


_stop = _Stop()
listen_for_stop = _stop.listen
