"""Ring the doorbell. By name, so that no worker code is imported here."""

from functools import cache
from typing import TYPE_CHECKING

import structlog

from api.settings import settings

if TYPE_CHECKING:
    from celery import Celery

DEFAULT = "celery"  # Celery's own name for it
HARDWARE = "hw."
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


def name(hardware: str) -> str:
    """Return the queue in which the bells of jobs for this device ring."""
    own = hardware in settings().hardware_queues
    return f"{HARDWARE}{hardware}" if own else DEFAULT


def names() -> list[str]:
    """Return every queue in which a bell may ring."""
    return [DEFAULT, *map(name, settings().hardware_queues)]


def hardware_of(queue: str) -> str | None:
    """Return the device that a queue is for. None: for all that have none."""
    return queue.removeprefix(HARDWARE) if queue.startswith(HARDWARE) else None


def ring(job_id: str, hardware: str = "") -> None:
    """Tell a worker that `job_id` is queued. A broker that is away is not an error:
    the row is there, and the sweep rings again.
    """
    _send(RUN_JOB, job_id, hardware)


def ring_for_help(job_id: str, hardware: str = "") -> None:
    """Tell one more worker that pieces of a running job wait; see `ring`."""
    _send(RUN_PIECES, job_id, hardware)


def rings(hardware: str) -> bool:
    """Return whether a bell rings there already, which a free worker will hear.

    False as well where the broker does not answer.
    """
    try:
        with producer().connection_for_write() as connection:
            found = connection.default_channel.queue_declare(
                queue=name(hardware), passive=True
            )
            return bool(found.message_count)
    except Exception:  # no such queue yet, or whatever the transport raises
        return False


def _send(task: str, job_id: str, hardware: str) -> None:
    try:
        producer().send_task(
            task,
            args=[job_id],
            queue=name(hardware),
            retry=False,
            ignore_result=True,
        )
    except Exception as error:  # whatever the transport raises; the row is the truth
        log.warning("broker_unreachable", job_id=job_id, error=type(error).__name__)


def reachable() -> bool:
    """Return whether the broker answers within `PATIENCE_S`."""
    try:
        with producer().connection_for_write() as connection:
            return connection.default_channel is not None  # reading it connects
    except Exception:  # whatever the transport raises means the same here
        return False
