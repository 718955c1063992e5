"""The rows of pieces, for the process that computes: what it may ask, and nothing else.

That process has no database, and may be a hostile model's by now. So it gets only the
pieces of its own job, finishes only what it was given, and reads and keeps results under
keys that only jobs on the same model ever ask for.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sqlalchemy.orm import Session

from api import jobs, pieces as rows, queue, watched
from api.pieces import PieceClaim
from api.transitions import Claim
from optimizer.errors import Cancelled
from optimizer.pieces import Piece
from optimizer.spec import OptimizeSpec
from workers.beat import HelpersBeat, Pulse
from workers.patience import insist, look

logger = logging.getLogger(__name__)

MOST_LOSSES = 1000  # tellings of a job's losses
LINES = 40  # of a job's log, within LINES_S; what is more is dropped
LINES_S = 10.0
MOST_STACKS = 32  # that a job tells of while it runs; it measures nine
MOST_TRIALS = 100_000  # that are counted; an honest job has some hundred
TOO_LONG = "TooLong"  # of a result: it is kept nowhere


@dataclass(slots=True)
class Bench:
    """One computing process: the results it may read and keep, the pieces it has."""

    job_id: str
    tenant_id: str
    model_sha256: str
    beat: Pulse
    worker: str
    held: dict[str, PieceClaim] = field(default_factory=dict)  # by the process's key
    since: dict[str, float] = field(default_factory=dict)  # when it got each; monotonic
    finished: int = 0

    def read(self, keys: Collection[str]) -> dict[str, str]:
        """Return the JSON text of each key that is kept."""
        own = {self.own(key): key for key in keys}
        found = insist(lambda session: rows.read(session, self.tenant_id, own))
        return {own[key]: text for key, text in found.items()}

    def keep(self, piece: Piece, text: str) -> None:
        """Keep a result."""
        mine = replace(piece, key=self.own(piece.key))
        insist(lambda session: rows.keep(session, self.tenant_id, mine, text))

    def finish(self, key: str, text: str | None) -> None:
        """Keep a piece's result, whoever has the piece by now. None: it is too long.

        Raises KeyError where this process was not given the piece.
        """
        claim, took_s = self.held.pop(key), self._took_s(key)
        self._now_computes()

        def write(session: Session) -> None:
            if text is None:
                rows.fail(session, claim, TOO_LONG)
                watched.note(session, claim, watched.FAILED, took_s)
            else:
                rows.finish(session, claim, text)
                watched.note(session, claim, watched.MEASURED, took_s)

        insist(write)
        self.finished += 1

    def give_back(self) -> None:
        """Let the next process compute what is held: the one that had it is gone."""
        while self.held:
            claim = self.held.popitem()[1]
            insist(partial(rows.release, claim=claim))
        self._now_computes()

    def failed(self) -> None:
        """Count what is held as measurements that could not be made."""
        for key, claim in self.held.items():
            took_s = self._took_s(key)
            write = partial(watched.note, claim=claim, result=watched.FAILED)
            insist(partial(write, seconds=took_s))

    def own(self, key: str) -> str:
        """Return the key of a row: another model's process never asks for it."""
        return hashlib.sha256(f"{self.model_sha256}:{key}".encode()).hexdigest()

    def _take(self, key: str, claim: PieceClaim) -> None:
        self.held[key], self.since[key] = claim, time.monotonic()
        self._now_computes()

    def _took_s(self, key: str) -> float:
        return time.monotonic() - self.since.pop(key)

    def _now_computes(self) -> None:
        """Tell the beat; a piece may need another, so several may be held."""
        self.beat.piece = next(reversed(self.held.values()), None)


@dataclass(slots=True)
class JobsBench(Bench):
    """That of a job's own process; helpers compute its pieces, too."""

    job: Claim = field(kw_only=True)
    told: int = 0  # stacks that the job's owner was told of
    lines: int = 0  # of the log, lately
    lines_since: float = field(default_factory=time.monotonic)
    wanted: set[str] = field(default_factory=set)  # keys of results asked for so far
    there: set[str] = field(default_factory=set)  # and those that were had

    @classmethod
    def of(cls, claim: Claim, beat: Pulse, worker: str) -> "JobsBench":
        """Return the bench of a job that this worker has."""
        model = claim.spec.model_sha256
        ids = (claim.job_id, claim.tenant_id, model)
        return cls(*ids, beat, worker, job=claim)

    @property
    def trials(self) -> jobs.Trials:
        """How many measurements are there, of those that were asked for so far."""
        return jobs.Trials(len(self.there), len(self.wanted))

    def read(self, keys: Collection[str]) -> dict[str, str]:
        """Return the JSON text of each key that is kept, and count them."""
        # A class with slots is made twice, and `super()` alone knows the first.
        found = super(JobsBench, self).read(keys)
        if len(self.wanted) < MOST_TRIALS:
            self.wanted.update(keys)
            self.there.update(found)
        return found

    def finish(self, key: str, text: str | None) -> None:
        """Keep a piece's result, and count it; see `Bench`."""
        super(JobsBench, self).finish(key, text)
        self.there.update({key} & self.wanted)

    def add(self, pieces: Sequence[Piece]) -> None:
        """Have these computed. Raises Cancelled where the job is not ours any more."""
        mine = [replace(piece, key=self.own(piece.key)) for piece in pieces]
        if not insist(lambda session: rows.add(session, self.job, mine)):
            raise Cancelled(f"job {self.job_id} is another worker's, or stopping")
        if len(pieces) > 1:
            queue.ring_for_help(self.job_id, self.job.spec.hardware)

    def claim(self, keys: Collection[str]) -> str | None:
        """Take one of these pieces that nobody computes. None: others have all."""
        self.beat.check()
        own = {self.own(key): key for key in keys}
        claim = insist(
            lambda session: rows.claim_own(session, self.job, own, self.worker)
        )
        if claim is None:
            return None
        key = own[claim.piece.key]
        self._take(key, claim)
        return key

    def underway(self, keys: Collection[str]) -> bool:
        """Return whether one of these is still to be done."""
        own = [self.own(key) for key in keys]
        return look(lambda session: rows.underway(session, self.job_id, own))

    def drop(self, keys: Collection[str]) -> None:
        """Take these away: their results were read."""
        own = [self.own(key) for key in keys]
        if not insist(lambda session: rows.drop(session, self.job, own)):
            raise Cancelled(f"job {self.job_id} is another worker's")

    def measured(self, stacks: list[dict[str, Any]]) -> None:
        """Tell the job's owner of stacks that were measured; of no more than there are.

        Raises Cancelled where the job is another worker's, or stopping.
        """
        rows_told = stacks[: MOST_STACKS - self.told]
        self.told += len(rows_told)
        if rows_told and not insist(lambda s: jobs.tried(s, self.job, rows_told)):
            raise Cancelled(f"job {self.job_id} is another worker's, or stopping")

    def losses(self, losses: dict[str, Any]) -> None:
        """Tell the job's owner of a run's losses; not more often than there are runs.

        Raises Cancelled where the job is another worker's, or stopping.
        """
        self.told += 1
        if self.told > MOST_LOSSES:
            return
        if not insist(lambda session: jobs.trained(session, self.job, losses)):
            raise Cancelled(f"job {self.job_id} is another worker's, or stopping")

    def log(self, line: str) -> None:
        """Tell the job's owner a line; what is too much, or too fast, is dropped.

        Raises Cancelled where the job is another worker's, or stopping.
        """
        now = time.monotonic()
        if now - self.lines_since > LINES_S:
            self.lines, self.lines_since = 0, now
        self.lines += 1
        if self.lines > LINES:
            return
        if not insist(lambda session: jobs.logged(session, self.job, line)):
            raise Cancelled(f"job {self.job_id} is another worker's, or stopping")


@dataclass(slots=True)
class HelpersBench(Bench):
    """That of a helper, whose job is another worker's."""

    def next(self) -> Piece | bool:
        """Take a piece. True: there may be one soon; False: go."""
        self.beat.check()
        claim = insist(lambda session: rows.claim(session, self.job_id, self.worker))
        if claim is None:
            return look(lambda session: rows.stay(session, self.job_id))
        self._take(claim.piece.key, claim)
        return claim.piece

    def leave(self, error: str) -> None:
        """Leave what is held to the job's own worker."""
        self.failed()
        with_error = partial(rows.fail, error=error)
        for claim in self.held.values():
            insist(partial(with_error, claim=claim))


Computing = Callable[[OptimizeSpec, HelpersBench], object]
"""Loads what a job needs, and computes pieces until none is left."""


def assist(job_id: str, worker: str, computing: Computing) -> int:
    """Compute pieces of a running job until none is left. Return how many.

    Safe to call twice: where no piece waits, nothing is loaded. No piece is held
    while the model loads: the others do not wait for that.
    """
    found = look(lambda session: rows.waiting(session, job_id))
    if found == 0:
        logger.info("job %s needs no help", job_id)
        return 0
    tenant_id, spec = look(lambda session: rows.owner(session, job_id))
    if found > 1:
        queue.ring_for_help(job_id, spec.hardware)  # whoever hears it rings on
    with HelpersBeat(job_id) as beat:
        bench = HelpersBench(job_id, tenant_id, spec.model_sha256, beat, worker)
        try:
            computing(spec, bench)
        except Cancelled:
            logger.info("job %s needs no help any more", job_id)
        except Exception as error:
            logger.exception("job %s is left to its own worker", job_id)
            # The message may hold the owner's data.
            bench.leave(getattr(error, "name", type(error).__name__))
    return bench.finished
