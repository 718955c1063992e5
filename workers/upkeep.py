"""Once in a while, beside the sweep: rows and files whose time is over go."""

import logging
from collections.abc import Callable
from datetime import timedelta

from sqlalchemy.orm import Session

from api import expiry, outbox, retention, sweeps
from api.db import transaction
from api.settings import settings
from api.transitions import now

logger = logging.getLogger(__name__)

EVERY_S = 3600.0
ROUNDS = 1000  # of one purge at a time; the rest waits for the next hour


def tidy() -> dict[str, int]:
    """Delete what is old, and return how much of each. One that fails stops no other."""
    steps: dict[str, Callable[[], int]] = {
        "events": lambda: _purge(sweeps.purge_events),
        "tombstones": lambda: _purge(sweeps.purge_tombstones),
        "promises": lambda: _purge(retention.purge_promises),
        "sessions": lambda: _purge(retention.purge_sessions),
        "letters": lambda: _purge(_letters),
        "artifacts": lambda: _all(retention.purge_artifacts),
        "uploads": lambda: _all(expiry.purge),
    }
    found = {}
    for name, step in steps.items():
        try:
            found[name] = step()
        except Exception:  # what cannot be deleted now can be in an hour
            logger.exception("old %s were not deleted; it will be tried again", name)
    return found


def _purge(purge: Callable[[Session], int]) -> int:
    def once() -> int:
        with transaction() as session:
            return purge(session)

    return _all(once)


def _all(once: Callable[[], int]) -> int:
    total = 0
    for _ in range(ROUNDS):
        count = once()
        total += count
        if count == 0:
            break
    return total


def _letters(session: Session) -> int:
    kept = timedelta(seconds=settings().events_kept_s)
    return outbox.purge(session, now(session) - kept)
