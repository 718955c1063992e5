"""What workers leave for whoever watches the service: nobody scrapes a worker.

    trial_tallies   how many measurements of what kind ended how, within what time
    gpus            the memory in use on each GPU, as its worker last read it

All queries on the two are in this file. Counts are only ever added to.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import case, delete, func, select
from sqlalchemy.orm import Session

from api.db import insert_into
from api.pieces import PieceClaim
from api.tallies import Times
from api.transitions import now
from api.watched_models import Gpu, TrialTally
from optimizer.abilities import FORMATS
from optimizer.pieces import Piece

MEASURED, FAILED = "measured", "failed"
REFERENCE, MIXED = "reference", "mixed"
BOUNDS_S = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)
BEYOND_S = 1e9  # of a measurement that took longer than all bounds
FRESH = timedelta(seconds=60)  # a figure that is older is nobody's any more
FAMILIES = frozenset(name.split("_")[0] for name in FORMATS)
PLAIN = frozenset({"fp32", "bf16"})  # what a precision is compared with
CORE = "core"  # that of `optimizer.swept`, which loads torch: both kinds of fp8


# -- measurements ----------------------------------------------------------------


def precision_of(piece: Piece) -> str:
    """Return what a piece is about: one of few words, whatever a process says.

    `fp8`, `int8`, …: the narrow formats that it tries; `mixed` of several, `reference`
    of none.

    Example: a stack with `fp8_e4m3_token` and `bf16` -> "fp8"
    """
    said = {word.split("_")[0] for word in _words(piece.payload)}
    found = ({"fp8"} if CORE in said else said & FAMILIES) - PLAIN
    if len(found) > 1:
        return MIXED
    return found.pop() if found else REFERENCE


def _words(payload: Mapping[str, Any]) -> list[str]:
    match payload:
        case {"family": str(family)}:
            return family.split("+")
        case {"pairs": [*pairs]}:
            return [pair[1] for pair in pairs if _is_pair(pair)]
        case {"stack": {**stack}}:
            return [choice for choice in stack.values() if isinstance(choice, str)]
        case {"candidate": {"arithmetic": str(arithmetic)}}:
            return [arithmetic]
    return []


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], str)


def note(session: Session, claim: PieceClaim, result: str, seconds: float) -> None:
    """Count a measurement that a worker made, or could not make."""
    bound = next((b for b in BOUNDS_S if seconds <= b), BEYOND_S)
    row = {
        "tenant_id": claim.tenant_id,
        "result": result,
        "precision": precision_of(claim.piece),
        "within_s": bound,
        "total": 1,
        "seconds": seconds,
    }
    added = {
        "total": TrialTally.total + 1,
        "seconds": TrialTally.seconds + seconds,
    }
    add = insert_into(session, "trial_tallies")
    key = ("tenant_id", "result", "precision", "within_s")
    session.execute(add.on_conflict_do_update(index_elements=key, set_=added), [row])


def counted(session: Session) -> dict[tuple[str, str], int]:
    """Return how many measurements there were, by result and precision."""
    rows = session.execute(
        select(TrialTally.result, TrialTally.precision, func.sum(TrialTally.total))
        .group_by(TrialTally.result, TrialTally.precision)
        .order_by(TrialTally.result, TrialTally.precision)
    )
    return {(result, precision): int(total) for result, precision, total in rows}


def times(session: Session, bounds_s: Sequence[float]) -> Times:
    """Return how long the measurements took that were made."""
    within = [
        func.sum(case((TrialTally.within_s <= bound, TrialTally.total), else_=0))
        for bound in bounds_s
    ]
    total, total_s = func.sum(TrialTally.total), func.sum(TrialTally.seconds)
    query = select(total, total_s, *within).where(TrialTally.result == MEASURED)
    count, sum_s, *at_most = session.execute(query).one()
    return Times(tuple(int(n or 0) for n in at_most), int(count or 0), sum_s or 0.0)


# -- GPUs ------------------------------------------------------------------------


def show_gpus(session: Session, used_bytes: Mapping[str, int]) -> None:
    """Say how much of each GPU's memory is in use; those that are gone are forgotten."""
    at = now(session)
    rows = [
        {"device": device, "used_bytes": used, "at": at}
        for device, used in sorted(used_bytes.items())
    ]
    if rows:
        add = insert_into(session, "gpus")
        changed = {name: add.excluded[name] for name in ("used_bytes", "at")}
        add = add.on_conflict_do_update(index_elements=("device",), set_=changed)
        session.execute(add, rows)
    session.execute(delete(Gpu).where(Gpu.at < at - FRESH))


def gpus(session: Session) -> dict[str, int]:
    """Return the bytes in use of every GPU whose worker lives."""
    fresh = select(Gpu).where(Gpu.at >= now(session) - FRESH).order_by(Gpu.device)
    return {row.device: row.used_bytes for row in session.scalars(fresh)}
