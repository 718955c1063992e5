"""The Celery application: `celery -A workers.app worker`, one per accelerator.

The parent process only listens and sweeps; each job runs in a child of its own. The
parent never loads torch: a fork or a second job must not find an accelerator in use.
"""

import logging
import os
import threading
from typing import Any

import celery
import kombu
from celery import Celery
from celery.signals import (
    setup_logging,
    worker_init,
    worker_process_init,
    worker_ready,
)
from celery.worker import state
from kombu import Queue
from sqlalchemy.exc import SQLAlchemyError

from api import pieces, queue, sweeps, tracing, turns, watched
from api.db import reading, transaction
from api.settings import settings
from api.supervise import die_with
from workers import device, logs, postman, upkeep
from workers.beat import listen_for_stop

logger = logging.getLogger(__name__)

OLDEST = (5, 7)  # earlier ones stop consuming after a Redis reconnect
GPUS_S = 15.0  # as often as Prometheus looks
PARENT = "PRECISION_WORKER_PID"
QUEUES = "PRECISION_WORKER_QUEUES"
CHILD_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # spinning halves the speed where cores are shared
    "THP_MEM_ALLOC_ENABLE": "1",  # torch: fewer page faults, a sweep is 10 % faster
}


def require(name: str, version: str) -> None:
    """Raise RuntimeError where `version` is older than what we can rely on."""
    found = tuple(int(part) for part in version.split(".")[:2])
    if found < OLDEST:
        raise RuntimeError(f"{name} {version} loses messages; install {name}>=5.7")


def create_app() -> Celery:
    """Return the application; the database decides on retries, not the broker."""
    for package in (celery, kombu):
        require(package.__name__, package.__version__)
    tracing.require()
    app = Celery(
        "precision",
        broker=settings().broker_url,
        include=["workers.tasks", "workers.profiles"],
    )
    longest_s = int(settings().run_limit_s)
    app.conf.update(
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,  # the row is the result
        # What a worker without `-Q` takes; with it, others are made as they are named.
        task_queues=[Queue(name, routing_key=name) for name in queue.names()],
        task_default_queue=queue.DEFAULT,
        # One bell is one try: a job that kills its worker must not be delivered again.
        task_acks_late=True,
        task_acks_on_timeout=True,
        task_reject_on_worker_lost=False,
        # The worker ends a job by itself; these are for a worker that hangs.
        task_soft_time_limit=longest_s + 60,
        task_time_limit=longest_s + 120,
        # A fresh process for every job, and no job behind another that is long.
        worker_pool_start_method="spawn",
        worker_concurrency=1,
        worker_max_tasks_per_child=1,
        worker_prefetch_multiplier=1,
        worker_disable_prefetch=True,
        worker_proc_alive_timeout=60,  # a child that starts on a busy machine is no dead one
        broker_connection_retry_on_startup=True,
        broker_transport_options={
            # Must exceed the longest job, or Redis hands it out a second time.
            "visibility_timeout": longest_s + 3600,
            "health_check_interval": 25,
            "socket_timeout": 30,
            "socket_keepalive": True,
        },
    )
    return app


app = create_app()


@setup_logging.connect
def log_as_json(**_: Any) -> None:
    """Take the place of Celery's own format, in the parent and in its children."""
    logs.configure(settings().log_level)


@worker_init.connect
def remember_parent(sender: Any, **_: Any) -> None:
    """Tell the children, who inherit the environment, whose they are, and the queues."""
    os.environ[PARENT] = str(os.getpid())
    os.environ[QUEUES] = ",".join(sender.app.amqp.queues.consume_from)


def queues() -> list[str]:
    """Return the queues that this worker listens to: it takes their jobs alone."""
    named = os.environ.get(QUEUES)
    return named.split(",") if named else queue.names()


@worker_process_init.connect
def prepare_child(**_: Any) -> None:
    """Die with the parent; set the environment before torch is loaded."""
    if parent := os.environ.get(PARENT):
        die_with(int(parent))
    listen_for_stop()
    os.environ.update(CHILD_ENVIRONMENT)
    tracing.start("worker")  # here, in each child: what sends survives no fork


@worker_ready.connect
def start_sweeper(**_: Any) -> None:
    """Sweep at once, for what was queued before we started, and from then on."""
    tracing.start("worker")  # of the postman; children have their own
    each = {
        "sweeper": _sweep_forever,
        "upkeep": _tidy_forever,
        "gpus": _show_gpus_forever,
    }
    for name, run in each.items():
        threading.Thread(target=run, name=name, daemon=True).start()
    postman.start()


def sweep() -> None:
    """Queue what stopped beating again, and ring for what waits.

    A busy worker leaves the bell to those who are free.
    """
    with transaction() as session:
        sweeps.sweep(session)
    with transaction() as session:
        short_of_hands = pieces.sweep(session, queues())
    if state.active_requests:
        return
    ring_for_next()
    for job in short_of_hands:
        if not queue.rings(job.hardware):
            queue.ring_for_help(job.id, job.hardware)


def ring_for_next() -> None:
    """Ring if a worker like this one could take a job, and no bell says so.

    One is enough: whoever hears it rings on. So bells never pile up, and none is
    missed for long: the sweep does this, too.
    """
    try:
        with reading() as session:
            job = turns.waits(session, queues())
    except SQLAlchemyError:  # whoever calls has more to do
        logger.warning("the database does not answer, so nobody rings; the sweep will")
        return
    if job is not None and not queue.rings(job.hardware):
        queue.ring(job.id, job.hardware)


def _sweep_forever() -> None:
    pause = threading.Event()
    while True:
        try:
            sweep()
        except Exception:  # a database that is away comes back; so must the sweep
            logger.exception("the sweep failed; it will be tried again")
        show_life()
        pause.wait(settings().sweep_s)


def show_life() -> None:
    """Touch the file of the settings: this process lives, whoever else is away."""
    file = settings().heartbeat_file
    if file is None:
        return
    try:
        file.touch()
    except OSError as error:
        logger.error("%s cannot be touched: %s", file, error.strerror)


def show_gpus() -> None:
    """Leave the memory in use on each GPU for `/metrics`, which nobody asks us for."""
    if used_bytes := device.memory_used():
        with transaction() as session:
            watched.show_gpus(session, used_bytes)


def _show_gpus_forever() -> None:
    pause = threading.Event()
    while device.program():
        try:
            show_gpus()
        except SQLAlchemyError:
            logger.warning("the memory of GPUs is not written down", exc_info=True)
        pause.wait(GPUS_S)


def _tidy_forever() -> None:
    pause = threading.Event()
    while True:
        upkeep.tidy()
        pause.wait(upkeep.EVERY_S)
