"""Places in the queues, worked out once in a while by each process.

Everybody who waits for a job asks for its place again and again, and the whole order
costs one query: so all who ask within a moment get the same one.
"""

import threading
import time
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from sqlalchemy.orm import Session

from api import queue, turns
from api.models import Job, Status

FRESH_S = 1.0  # an order that is older than this is worked out again
NEW_S = 0.1  # a job that is not in it was queued since, unless it is younger than this


class _Order(NamedTuple):
    places: Mapping[str, int]
    at: float  # monotonic


class Places:
    """The last order of each queue."""

    def __init__(self) -> None:
        self._orders: dict[str, _Order] = {}
        self._turn = threading.Lock()

    def of(self, session: Session, job: Job) -> int | None:
        """Return a queued job's place, from 1. None: it does not wait."""
        if job.status is not Status.QUEUED:
            return None
        own = queue.name(job.hardware)
        order = self._orders.get(own)
        if order is None or _old(order, job.id):
            order = self._worked_out(session, own, job.id)
        return order.places.get(job.id)

    def _worked_out(self, session: Session, own: str, job_id: str) -> _Order:
        with self._turn:  # one asks the database, the others take what it says
            order = self._orders.get(own)
            if order is None or _old(order, job_id):
                order = _Order(turns.places(session, own), time.monotonic())
                self._orders[own] = order
            return order


@cache
def places() -> Places:
    """Return the places of this process."""
    return Places()


def _old(order: _Order, job_id: str) -> bool:
    known_s = FRESH_S if job_id in order.places else NEW_S
    return time.monotonic() - order.at > known_s
