"""Pieces of jobs, shared through the database: read, computed here, or by helpers.

A job's own worker asks for a list of results (`Shared`). What is not kept becomes rows;
it computes one after the other, and whoever else hears the bell does so too (`assist`),
until all are there. Whoever computes a piece, its bytes are the same.
"""

import json
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from api import pieces as rows, queue
from api.db import reading, transaction
from api.pieces import PieceClaim
from api.transitions import Claim
from optimizer.errors import Cancelled
from optimizer.pieces import Compute, Piece, Pieces, Result, Told, to_json
from optimizer.spec import OptimizeSpec
from workers.beat import Beat, HelpersBeat, Pulse

logger = logging.getLogger(__name__)

POLL_S = 0.2  # how often others' results, or more pieces, are looked for
LINGER_S = 60.0  # a helper that has the model loaded waits this long for more pieces
TRIES = 5  # 0.5 + 1 + 2 + 4 s: within the lease, the claim is still ours

T = TypeVar("T")
MakeCompute = Callable[[OptimizeSpec, Pieces], Compute]
"""Loads what a job needs, and returns how its pieces are computed."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Reads what is kept of one tenant; computes the rest here, and keeps it."""

    tenant_id: str

    def run(
        self, pieces: Sequence[Piece], compute: Compute, progress: Told
    ) -> list[Result]:
        """Return every piece's result in the order given; see `Pieces`."""
        found = self.read([piece.key for piece in pieces])
        for piece in pieces:
            if piece.key not in found:
                progress(len(found), len(pieces))
                found[piece.key] = self._keep(piece, to_json(compute(piece)))
        return [json.loads(found[piece.key]) for piece in pieces]

    def read(self, keys: Collection[str]) -> dict[str, str]:
        """Return the JSON text of each key that is kept."""
        return _insist(lambda session: rows.read(session, self.tenant_id, keys))

    def _keep(self, piece: Piece, text: str) -> str:
        _insist(lambda session: rows.keep(session, self.tenant_id, piece, text))
        return text


@dataclass(frozen=True, slots=True)
class Shared:
    """The pieces of one job, for its own worker: helpers compute them, too."""

    claim: Claim
    beat: Beat
    worker: str

    def run(
        self, pieces: Sequence[Piece], compute: Compute, progress: Told
    ) -> list[Result]:
        """Return every piece's result in the order given; see `Pieces`.

        Raises Cancelled where the job is not this worker's any more.
        """
        wanted = {piece.key: piece for piece in pieces}
        kept = Kept(self.claim.tenant_id)
        found = kept.read(wanted)
        missing = [key for key in wanted if key not in found]
        if missing:
            self._add([wanted[key] for key in missing])
        while missing:
            progress(len(found), len(wanted))
            busy = self._compute_one(missing, compute) or self._wait(missing)
            found |= kept.read(missing)
            missing = [key for key in wanted if key not in found]
            if missing and not busy:  # a result was lost since it was done
                self._add([wanted[key] for key in missing])
        self._drop(wanted)
        progress(len(wanted), len(wanted))
        return [json.loads(found[piece.key]) for piece in pieces]

    def _add(self, pieces: list[Piece]) -> None:
        if not _insist(lambda session: rows.add(session, self.claim, pieces)):
            raise Cancelled(f"job {self.claim.job_id} is another worker's, or stopping")
        if len(pieces) > 1:
            queue.ring_for_help(self.claim.job_id)

    def _compute_one(self, keys: Collection[str], compute: Compute) -> bool:
        """Compute a piece that nobody does. False: others have all of them."""
        claim = _insist(
            lambda session: rows.claim_own(session, self.claim, keys, self.worker)
        )
        if claim is not None:
            _compute(self.beat, claim, compute)
        return claim is not None

    def _wait(self, keys: Collection[str]) -> bool:
        """Wait a moment for others. False: none of these is still to be done."""
        time.sleep(POLL_S)
        return _look(lambda session: rows.underway(session, self.claim.job_id, keys))

    def _drop(self, keys: Collection[str]) -> None:
        if not _insist(lambda session: rows.drop(session, self.claim, keys)):
            raise Cancelled(f"job {self.claim.job_id} is another worker's")


def assist(job_id: str, worker: str, make: MakeCompute) -> int:
    """Compute pieces of a running job until none is left. Return how many.

    Safe to call twice: where no piece waits, nothing is loaded. No piece is held
    while the model loads: the others do not wait for that.
    """
    count = 0
    found = _look(lambda session: rows.waiting(session, job_id))
    if found == 0:
        logger.info("job %s needs no help", job_id)
        return count
    if found > 1:
        queue.ring_for_help(job_id)  # whoever hears it rings on
    with HelpersBeat(job_id) as beat:
        try:
            tenant_id, spec = _look(lambda session: rows.owner(session, job_id))
            compute = make(spec, Kept(tenant_id))
            while (claim := _next(job_id, worker)) is not None:
                beat.piece = claim
                _compute(beat, claim, compute)
                count += 1
        except Cancelled:
            logger.info("job %s needs no help any more", job_id)
        except Exception as error:
            logger.exception("job %s is left to its own worker", job_id)
            _leave(beat, error)
    return count


def _next(job_id: str, worker: str) -> PieceClaim | None:
    """Take a piece, or wait for the job's next list. None: go."""
    end = time.monotonic() + LINGER_S
    while True:
        claim = _insist(lambda session: rows.claim(session, job_id, worker))
        if claim is not None or time.monotonic() > end:
            return claim
        if not _look(lambda session: rows.stay(session, job_id)):
            return None
        time.sleep(POLL_S)


def _compute(beat: Pulse, claim: PieceClaim, compute: Compute) -> None:
    """Compute a piece and keep what it comes to, whoever has the piece by then."""
    beat.check()
    outer, beat.piece = beat.piece, claim  # computing one may need another
    text = to_json(compute(claim.piece))
    beat.piece = outer if outer is not claim else None
    _insist(lambda session: rows.finish(session, claim, text))


def _leave(beat: Pulse, error: Exception) -> None:
    if (claim := beat.piece) is not None:
        name = type(error).__name__  # the message may hold the owner's data
        _insist(lambda session: rows.fail(session, claim, name))


def _insist(write: Callable[[Session], T]) -> T:
    """Return what a transaction does, also where the database is away for a moment."""
    return _patiently(transaction, write)


def _look(read: Callable[[Session], T]) -> T:
    """Return what is read, also where the database is away for a moment."""
    return _patiently(reading, read)


def _patiently(
    opened: Callable[[], AbstractContextManager[Session]], act: Callable[[Session], T]
) -> T:
    for attempt in range(1, TRIES):
        try:
            with opened() as session:
                return act(session)
        except OperationalError:
            logger.warning("the database does not answer; trying again")
            time.sleep(0.25 * 2**attempt)
    with opened() as session:
        return act(session)
