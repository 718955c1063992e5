"""What a worker writes and reads although the database is away for a moment."""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from api.db import reading, transaction

logger = logging.getLogger(__name__)

TRIES = 6  # 0.5 + 1 + 2 + 4 + 8 s: within the lease, the claim is still ours

T = TypeVar("T")


def insist(write: Callable[[Session], T]) -> T:
    """Return what a transaction does.

    It may be done twice: a commit whose answer was lost has been made.
    """
    return _patiently(transaction, write)


def look(read: Callable[[Session], T]) -> T:
    """Return what is read."""
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
