"""Kept results, and the pieces of running jobs. All their queries are in this file.

    queued → running → done              the result is kept, in the same transaction
                └────→ failed            a helper could not: the job's worker tries

The same three ideas as for jobs: a claim is one UPDATE … RETURNING, a worker beats
while it computes, and what it says carries its attempt (the fence). A piece whose
worker fell silent is as if queued. Only the job's own worker adds pieces and takes
them away; any worker may compute one, and the result is kept whoever did.

Callers commit (`db.transaction`), and time is the database's.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, exists, func, or_, select, update
from sqlalchemy.orm import Session

from api import jobs, queue, storage, turns
from api.db import insert_into
from api.jobs import Signal
from api.models import FINAL, Job, JobPiece, KeptResult, PieceState, Status
from api.settings import settings
from api.sweeps import LIMIT
from api.transitions import Claim, now
from optimizer.pieces import Piece
from optimizer.spec import OptimizeSpec

INLINE_BYTES = 2**20  # a longer result is a file
TOUCH_S = 60.0  # `last_used_at` is this exact, so that most reads write nothing
HELPER_TRIES = 2  # a piece that cost so many workers is left to the job's own


@dataclass(frozen=True, slots=True)
class PieceClaim:
    """The right to compute one piece. A later claim on the same piece voids it."""

    job_id: str
    tenant_id: str
    attempt: int
    piece: Piece


# -- results -------------------------------------------------------------------


def read(session: Session, tenant_id: str, keys: Collection[str]) -> dict[str, str]:
    """Return the JSON text of each key whose result the tenant has."""
    wanted = and_(KeptResult.tenant_id == tenant_id, KeptResult.key.in_(keys))
    rows = session.execute(select(KeptResult.key, KeptResult.text).where(wanted)).all()
    _touch(session, wanted)
    texts = {key: _text(tenant_id, key) if text is None else text for key, text in rows}
    return {key: text for key, text in texts.items() if text is not None}


def keep(session: Session, tenant_id: str, piece: Piece, text: str) -> None:
    """Keep a result. Where the key has one, that one stays: it is the same."""
    at, count = now(session), len(text.encode())
    if count > INLINE_BYTES:
        storage.store().write(_place(tenant_id, piece.key), text.encode())
    row = {
        "tenant_id": tenant_id,
        "key": piece.key,
        "kind": piece.kind,
        "text": text if count <= INLINE_BYTES else None,
        "bytes": count,
        "created_at": at,
        "last_used_at": at,
    }
    session.execute(insert_into(session, "results").on_conflict_do_nothing(), [row])


def _touch(session: Session, wanted: ColumnElement[bool]) -> None:
    at = now(session)
    old = KeptResult.last_used_at < at - timedelta(seconds=TOUCH_S)
    free = select(KeptResult.key).where(wanted, old).order_by(KeptResult.key)
    session.execute(
        update(KeptResult)
        .where(wanted, KeptResult.key.in_(free.with_for_update(skip_locked=True)))
        .values(last_used_at=at)
        .execution_options(synchronize_session=False)
    )


def _place(tenant_id: str, key: str) -> str:
    """Return where a long result lies. Raises ValueError if `key` leads elsewhere."""
    if not storage.NAME.fullmatch(key):
        raise ValueError(f"not a key: {key!r}")
    return f"results/{tenant_id}/{key[:2]}/{key}.json"


def _text(tenant_id: str, key: str) -> str | None:
    """Return a long result. None: its file is gone, so it is to be computed again."""
    try:
        return storage.store().read(_place(tenant_id, key)).decode()
    except FileNotFoundError:
        return None


# -- for the job's own worker ----------------------------------------------------


def add(session: Session, claim: Claim, pieces: Sequence[Piece]) -> bool:
    """Have these pieces computed, whose results are not there. False: claim is void.

    Those that are queued or running stay as they are.
    """
    if jobs.beat(session, claim) is not Signal.OK:  # this locks the job's row
        return False
    rows = [
        {
            "job_id": claim.job_id,
            "key": piece.key,
            "place": place,
            "kind": piece.kind,
            "payload": piece.payload,
            "state": PieceState.QUEUED,
            "attempt": 0,
        }
        for place, piece in enumerate(pieces)
    ]
    again = insert_into(session, "pieces").on_conflict_do_update(
        index_elements=["job_id", "key"],
        set_={"state": PieceState.QUEUED},
        where=JobPiece.state == PieceState.DONE,  # its result was lost since
    )
    session.execute(again, rows)
    return True


def claim_own(
    session: Session, claim: Claim, keys: Collection[str], worker: str
) -> PieceClaim | None:
    """Take the next of these pieces that nobody computes, also one that failed."""
    ready = or_(_waits(now(session)), JobPiece.state == PieceState.FAILED)
    return _claim(session, claim.job_id, and_(ready, JobPiece.key.in_(keys)), worker)


def drop(session: Session, claim: Claim, keys: Collection[str]) -> bool:
    """Take pieces away: their results were read. False: the claim is void."""
    if jobs.beat(session, claim) is Signal.LOST:
        return False
    read = and_(JobPiece.job_id == claim.job_id, JobPiece.key.in_(keys))
    session.execute(delete(JobPiece).where(read))
    return True


# -- for whoever computes ----------------------------------------------------------


def claim(session: Session, job_id: str, worker: str) -> PieceClaim | None:
    """Take the next piece of a running job. None: there is none that waits."""
    return _claim(session, job_id, _helpable(now(session)), worker)


def beat(session: Session, claim: PieceClaim) -> Signal:
    """Say that the worker lives, and hear whether it should go on."""
    if not _change(session, claim, heartbeat_at=now(session)):
        return Signal.LOST
    return Signal.OK if runs(session, claim.job_id) else Signal.CANCEL


def finish(session: Session, claim: PieceClaim, text: str) -> bool:
    """Keep a piece's result. False: another has the piece; it is kept all the same."""
    keep(session, claim.tenant_id, claim.piece, text)
    return _change(session, claim, state=PieceState.DONE, worker=None)


def fail(session: Session, claim: PieceClaim, error: str) -> bool:
    """Leave a piece to the job's own worker. False: the claim is void."""
    changes = {"state": PieceState.FAILED, "worker": None, "error": error}
    return _change(session, claim, **changes)


def release(session: Session, claim: PieceClaim) -> bool:
    """Give a piece back: the worker is told to stop. False: the claim is void."""
    return _change(session, claim, state=PieceState.QUEUED, worker=None)


def runs(session: Session, job_id: str) -> bool:
    """Return whether a job is running, so that its pieces are wanted."""
    status = session.scalar(select(Job.status).where(Job.id == job_id))
    return status is Status.RUNNING


def waiting(session: Session, job_id: str) -> int:
    """Return how many pieces of a running job wait for helpers."""
    mine = and_(JobPiece.job_id == job_id, _helpable(now(session)))
    count = select(func.count()).select_from(JobPiece).where(mine)
    return int(session.scalar(count) or 0) if runs(session, job_id) else 0


def owner(session: Session, job_id: str) -> tuple[str, OptimizeSpec]:
    """Return whose job it is, and what was asked for."""
    job = session.get_one(Job, job_id)
    return job.tenant_id, OptimizeSpec.from_json(job.spec)


def underway(session: Session, job_id: str, keys: Collection[str]) -> bool:
    """Return whether one of these pieces is still to be done."""
    mine = and_(JobPiece.job_id == job_id, JobPiece.key.in_(keys))
    left = select(JobPiece.key).where(mine, JobPiece.state != PieceState.DONE)
    return session.scalar(left.limit(1)) is not None


def stay(session: Session, job_id: str) -> bool:
    """Return whether a helper without a piece should wait for one.

    The job runs, and no other one could start in its stead.
    """
    job = session.get_one(Job, job_id)
    beside = [queue.name(job.hardware)]
    return runs(session, job_id) and turns.waits(session, beside) is None


def _claim(
    session: Session, job_id: str, ready: ColumnElement[bool], worker: str
) -> PieceClaim | None:
    mine = JobPiece.job_id == job_id
    first = select(JobPiece.key).where(mine, ready).order_by(JobPiece.place).limit(1)
    row = session.scalar(
        update(JobPiece)
        .where(
            mine,
            JobPiece.key == first.with_for_update(skip_locked=True).scalar_subquery(),
            exists().where(Job.id == job_id, Job.status == Status.RUNNING),
        )
        .values(
            state=PieceState.RUNNING,
            attempt=JobPiece.attempt + 1,
            worker=worker,
            heartbeat_at=now(session),
        )
        .returning(JobPiece)
        .execution_options(populate_existing=True, synchronize_session=False)
    )
    if row is None:
        return None
    tenant_id = session.scalars(select(Job.tenant_id).where(Job.id == job_id)).one()
    piece = Piece(row.kind, row.key, row.payload)
    return PieceClaim(job_id, tenant_id, row.attempt, piece)


def _change(session: Session, claim: PieceClaim, **changes: Any) -> bool:
    held = session.scalar(
        update(JobPiece)
        .where(
            JobPiece.job_id == claim.job_id,
            JobPiece.key == claim.piece.key,
            JobPiece.attempt == claim.attempt,
            JobPiece.state == PieceState.RUNNING,
        )
        .values(changes)
        .returning(JobPiece.key)
        .execution_options(synchronize_session=False)
    )
    return held is not None


def _waits(at: datetime) -> ColumnElement[bool]:
    """Nobody computes the piece: it was not taken, or its worker fell silent."""
    silent = JobPiece.heartbeat_at < at - timedelta(seconds=settings().lease_s)
    return or_(
        JobPiece.state == PieceState.QUEUED,
        and_(JobPiece.state == PieceState.RUNNING, silent),
    )


def _helpable(at: datetime) -> ColumnElement[bool]:
    return and_(_waits(at), JobPiece.attempt < HELPER_TRIES)


# -- for the sweep -------------------------------------------------------------


def sweep(session: Session, queues: Collection[str]) -> list[Job]:
    """Forget what nobody wants. Return jobs whose pieces wait for these workers."""
    over = select(Job.id).where(Job.status.in_(FINAL))
    session.execute(delete(JobPiece).where(JobPiece.job_id.in_(over)))
    evict(session)
    mine = and_(JobPiece.job_id == Job.id, _helpable(now(session)))
    short = and_(Job.status == Status.RUNNING, exists().where(mine))
    query = select(Job).where(short, turns.rung_in(queues)).order_by(Job.id)
    return list(session.scalars(query.limit(LIMIT)))


def evict(session: Session) -> None:
    """Forget the results that were not used for longest, until the rest fits.

    Those of pieces that a job still has to read stay.
    """
    excess = _total_bytes(session) - settings().results_max_bytes
    if excess <= 0:
        return
    unread = exists().where(JobPiece.key == KeptResult.key)
    oldest = (
        select(KeptResult)
        .where(~unread)
        .order_by(KeptResult.last_used_at, KeptResult.key)
        .limit(LIMIT)
        .with_for_update(skip_locked=True)
    )
    for row in session.scalars(oldest):
        if excess <= 0:
            break
        excess -= row.bytes
        if row.text is None:
            storage.store().remove(_place(row.tenant_id, row.key))
        session.delete(row)
    session.flush()


def _total_bytes(session: Session) -> int:
    return int(session.scalar(select(func.sum(KeptResult.bytes))) or 0)
