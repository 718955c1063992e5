"""What a worker does when the bell rings: claim, run, close."""

import json
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from api import jobs, profiles, storage
from api.db import transaction
from api.queue import RUN_JOB, RUN_PIECES
from api.settings import settings
from api.storage import Stored
from api.transitions import Claim
from optimizer import hardware
from optimizer.errors import Cancelled, OptimizerError
from optimizer.pieces import Compute, Pieces
from optimizer.spec import OptimizeSpec
from workers.app import app, queues, ring_for_next
from workers.beat import Beat, Progress
from workers.pieces import Shared, assist

logger = logging.getLogger(__name__)

# Shares of a job's time, of 100; measured on SmolLM2-135M and two cores.
PHASES = {
    "load": 4.0,
    "calibrate": 8.0,
    "sweep": 38.0,
    "search": 2.0,
    "validate": 46.0,
    "report": 2.0,
}
CLOSE_TRIES = 6  # 0.5 + 1 + 2 + 4 + 8 s: within the lease, the row is still ours

Document = dict[str, Any]


@app.task(name=RUN_JOB)
def run_job(job_id: str) -> None:
    """Run the job whose turn it is to its end; `job_id` is the one that rang.

    Safe to call twice: the second finds it taken.
    """
    with transaction() as session:
        claim = jobs.claim_next(session, _name(), queues())
    if claim is None:
        logger.info("job %s is taken, finished, or has to wait", job_id)
        return
    ring_for_next()  # others may be free
    try:
        _run(claim)
    finally:
        ring_for_next()  # its tenant may run one more now


def _run(claim: Claim) -> None:
    meter = Meter()
    with Beat(claim) as beat:
        try:
            document = _optimize(claim, meter, beat)
            _finalize(claim, document)
        except Cancelled:
            _close(claim, lambda session: False)
        except Exception as error:
            logger.exception("job %s failed in %s", claim.job_id, meter.phase)
            problem = explain(error, meter.phase)
            _close(claim, lambda session: jobs.fail(session, claim, problem))


@app.task(name=RUN_PIECES)
def run_pieces(job_id: str) -> None:
    """Help a running job. Safe to call twice: the second finds no piece."""
    count = assist(job_id, _name(), _work)
    logger.info("job %s: %d pieces computed here", job_id, count)


def _name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


class Meter:
    """Turns phases into one percentage that never goes back, and an ETA."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.phase = "load"
        self._percent = 0.0
        self._clock = clock
        self._start = clock()

    def read(self, phase: str, fraction: float) -> Progress:
        """Return the progress at `fraction` (0..1) of `phase`."""
        before = 0.0
        for name, share in PHASES.items():
            if name == phase:
                before += share * min(max(fraction, 0.0), 1.0)
                break
            before += share
        self.phase = phase
        self._percent = max(self._percent, before)
        return Progress(phase, self._percent, self._eta_s())

    def _eta_s(self) -> float | None:
        elapsed_s = self._clock() - self._start
        if self._percent < 2.0 or elapsed_s < 1.0:  # too little to go by
            return None
        return elapsed_s * (100.0 - self._percent) / self._percent


def explain(error: BaseException, phase: str) -> dict[str, Any]:
    """Return the error that the job's owner sees. Our own defects stay in the log."""
    code, category, retryable = "internal_error", "platform", True
    message = "the worker met a defect of its own; the operator's log has the details"
    if isinstance(error, OptimizerError):
        code, category, retryable = error.code, error.category, False
        message = str(error)
    elif isinstance(error, SoftTimeLimitExceeded):
        code, category, retryable = "deadline_exceeded", "user", False
        message = "the job ran longer than the service allows; ask for fewer tokens"
    elif _is_out_of_memory(error):
        code, category, retryable = "device_out_of_memory", "hardware", False
        message = "the worker ran out of memory; ask for fewer or shorter sequences"
    found = {"code": code, "category": category, "retryable": retryable}
    return {**found, "message": message, "phase": phase}


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. By name, for torch is not to be imported for this."""
    named = type(error).__name__ == "OutOfMemoryError"
    allocator = isinstance(error, RuntimeError) and "can't allocate memory" in str(
        error
    )
    return isinstance(error, MemoryError) or named or allocator


def _optimize(claim: Claim, meter: Meter, beat: Beat) -> Document:
    beat.tell(meter.read("load", 0.0))
    _prepare()
    from optimizer.run import optimize

    def progress(phase: str, fraction: float, detail: str = "") -> None:
        beat.tell(meter.read(phase, fraction))

    profile = profiles.tables(claim.spec.hardware)
    return optimize(claim.spec, progress, Shared(claim, beat, _name()), profile)


def _work(spec: OptimizeSpec, pieces: Pieces) -> Compute:
    """Load a job's model, and return how its pieces are computed."""
    _prepare()
    from optimizer.work import Work

    work = Work(spec, pieces)
    work.opened()
    assert work.model is not None  # reading it loads it
    return work.compute


def _prepare() -> None:
    import torch  # seconds, and never in the parent

    hardware.use(settings().hardware_file)
    torch.set_num_threads(settings().threads or os.cpu_count() or 1)


def _finalize(claim: Claim, document: Document) -> None:
    """Store what came out, then publish it with the job's success, at once."""
    with transaction() as session:
        if not jobs.finalize(session, claim):
            raise Cancelled
    artifacts = [_put(claim, name, text) for name, text in _files(document).items()]
    outcome, summary = document["verdict"]["outcome"], summarize(document)
    _close(
        claim,
        lambda session: jobs.succeed(session, claim, outcome, summary, artifacts),
    )


def _files(document: Document) -> dict[str, str]:
    from optimizer.report import render_html

    return {
        "report.json": json.dumps(document, allow_nan=False),
        "report.html": render_html(document),
        "stack.json": json.dumps(stack(document), indent=1),
    }


def _put(claim: Claim, name: str, text: str) -> Stored:
    return storage.put(claim.job_id, claim.attempt, name, text.encode())


def stack(document: Document) -> Document:
    """Return the answer alone, for machines: a choice for every site."""
    return {
        "schema": "precision.stack/1",
        "model": {k: document["model"][k] for k in ("name", "sha256")},
        "hardware": document["hardware"]["id"],
        "rounding": document["rounding"]["used"],
        "stack": {site["site"]: site["choice"] for site in document["sites"]},
        "padding": {s["site"]: s["padding"] for s in document["sites"] if s["padding"]},
    }


def summarize(document: Document) -> Document:
    """Return what the job object shows of the report: points without their stacks."""
    front = [{k: v for k, v in p.items() if k != "stack"} for p in document["front"]]
    validated = document["validation"]["stacks"]
    return {
        "outcome": document["verdict"]["outcome"],
        "precision_stack": document["precision_stack"],
        "layers": document["layers"],
        "front": front,
        "chosen": next(s for s in validated if s["id"] == "chosen"),
    }


def _close(claim: Claim, end: Callable[[Session], bool]) -> None:
    """Write the end, whatever the database does meanwhile; a cancel comes first.

    Nothing is written where the claim is void.
    """
    for attempt in range(1, CLOSE_TRIES + 1):
        try:
            with transaction() as session:
                if not end(session):
                    jobs.cancelled(session, claim)
            return
        except OperationalError:
            if attempt == CLOSE_TRIES:
                raise
            logger.warning("job %s: could not be closed yet", claim.job_id)
            time.sleep(0.25 * 2**attempt)
