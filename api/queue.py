"""Ring the doorbell. By name, so that no worker code is imported here."""

from functools import cache
from typing import TYPE_CHECKING

import structlog

from api.settings import settings

if TYPE_CHECKING:
    from celery import Celery

RUN_JOB = "precision.run_job"
RUN_PIECES = "precision.run_pieces"
PATIENCE_S = 2.0  # a caller waits for this, so no longer

log = structlog.get_logger()


@cache
def producer() -> "Celery":
    """Return a Celery app that only sends."""
    from celery import Celery  # half a second to import: not at the start of the API

    app = Celery("precision", broker=settings().broker_url, set_as_current=False)
    app.conf.broker_transport_options = {
        "socket_connect_timeout": PATIENCE_S,
        "socket_timeout": PATIENCE_S,
        "max_retries": 0,
    }
    return app


def ring(job_id: str) -> None:
    """Tell a worker that `job_id` is queued. A broker that is away is not an error:
    the row is there, and the sweep rings again.
    """
    _send(RUN_JOB, job_id)


def ring_for_help(job_id: str) -> None:
    """Tell one more worker that pieces of a running job wait; see `ring`."""
    _send(RUN_PIECES, job_id)


def _send(task: str, job_id: str) -> None:
    try:
        producer().send_task(task, args=[job_id], retry=False, ignore_result=True)
    except Exception as error:  # whatever the transport raises; the row is the truth
        log.warning("broker_unreachable", job_id=job_id, error=type(error).__name__)


def reachable() -> bool:
    """Return whether the broker answers within `PATIENCE_S`."""
    try:
        with producer().connection_for_write() as connection:
            return connection.default_channel is not None  # reading it connects
    except Exception:  # whatever the transport raises means the same here
        return False
