"""What a worker does when the bell rings: claim, have it computed, publish, close."""

import logging
import os
import socket
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from api import jobs, storage, sweeps, tracing
from api.queue import RUN_JOB, RUN_PIECES
from api.tracing import Span
from api.transitions import Claim
from optimizer.errors import Cancelled
from optimizer.spec import OptimizeSpec
from workers import failures, hub, logs, outputs, relay, signing, spans, workdir
from workers.app import app, queues, ring_for_next
from workers.beat import Beat, Overdue, Progress
from workers.channel import Garbled
from workers.messages import Done
from workers.patience import insist
from workers.pieces import HelpersBench, JobsBench, assist
from workers.relay import Crashed, Refused
from workers.spans import Phases
from workers.watch import OutOfMemory, TooMany
from workers.workdir import Workdir

logger = logging.getLogger(__name__)

# Shares of a job's time, of 100; measured on SmolLM2-135M and two cores.
PHASES = {
    "load": 4.0,
    "calibrate": 8.0,
    "sweep": 38.0,
    "search": 2.0,
    "validate": 38.0,
    "export": 8.0,
    "report": 2.0,
}
FETCHING = {"fetch": 50.0} | {name: share / 2 for name, share in PHASES.items()}
STORE = "store"  # its artifacts: no phase of the job's, and a span all the same
TOO_LONG = {
    "code": "deadline_exceeded",
    "category": "user",
    "retryable": False,
    "message": "the job ran longer than it may; ask for fewer tokens, or for more time "
    "(search.max_runtime_seconds) where the service allows it",
}
TAKEN_OVER = {
    "code": "untrusted_process",
    "category": "platform",
    "retryable": False,
    "message": "the process that computed the job did what no job does, and was ended; "
    "the operator's log has the details",
}
MOST_FILES = 4096  # that a job may leave


@app.task(name=RUN_JOB)
def run_job(job_id: str) -> None:
    """Run the job whose turn it is to its end; `job_id` is the one that rang.

    Safe to call twice: the second finds it taken.
    """
    claim = insist(lambda session: jobs.claim_next(session, _name(), queues()))
    if claim is None:
        logger.info("job %s is taken, finished, or has to wait", job_id)
        return
    try:
        # The beat before all else: it gives the job back at SIGTERM.
        with logs.of(claim), Beat(claim) as beat, spans.of(claim) as span:
            ring_for_next()  # others may be free
            _run(claim, beat, span)
    finally:
        ring_for_next()  # its tenant may run one more now
        tracing.flush()  # this process ends with its job


def _run(claim: Claim, beat: Beat, span: Span) -> None:
    here = claim.spec.model_sha256 != ""
    meter = Meter(PHASES if here else FETCHING)
    try:
        with Phases(span) as phases:
            if not here:
                claim = _with_model(claim, meter, beat, phases)
            _compute(claim, meter, beat, phases)
    except Cancelled:
        span.say({"precision.cancelled": 1})
        _close(claim, lambda session: False)
    except (Crashed, OperationalError) as error:  # the latter: away for long
        logger.exception("job %s lost its process in %s", claim.job_id, meter.phase)
        span.failed("process_lost")
        excerpt = getattr(error, "excerpt", "")
        _close(claim, lambda session: sweeps.lost(session, claim, excerpt))
    except Exception as error:
        logger.exception("job %s failed in %s", claim.job_id, meter.phase)
        problem = explain(error, meter.phase)
        span.failed(problem["code"])
        _close(claim, lambda session: jobs.fail(session, claim, problem))


@app.task(name=RUN_PIECES)
def run_pieces(job_id: str) -> None:
    """Help a running job. Safe to call twice: the second finds no piece."""
    count = assist(job_id, _name(), _help)
    logger.info("job %s: %d pieces computed here", job_id, count)


def _name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


class Meter:
    """Turns phases into one percentage that never goes back, and an ETA."""

    def __init__(
        self,
        shares: Mapping[str, float] = PHASES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.phase = next(iter(shares))
        self._shares = shares
        self._percent = 0.0
        self._clock = clock
        self._start = clock()

    def read(self, phase: str, fraction: float) -> Progress:
        """Return the progress at `fraction` (0..1) of `phase`."""
        before = 0.0
        for name, share in self._shares.items():
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
    if isinstance(error, Refused):
        return error.problem
    found = failures.explain(error, phase)
    if isinstance(error, OutOfMemory):
        found |= failures.OUT_OF_MEMORY
    elif isinstance(error, Overdue | SoftTimeLimitExceeded):
        found |= TOO_LONG
    elif isinstance(error, Garbled | TooMany):
        found |= TAKEN_OVER
    elif isinstance(error, OSError):
        found |= failures.NO_ROOM
    return found


def _with_model(claim: Claim, meter: Meter, beat: Beat, phases: Phases) -> Claim:
    """Return the claim with the model that its address names, which is here by then.

    Raises Refused where there is none, and Cancelled.
    """

    def told(fraction: float) -> None:
        beat.tell(meter.read("fetch", fraction))

    phases.enter("fetch")
    told(0.0)
    model = hub.bring(claim, beat.check, told)
    spec = replace(
        claim.spec,
        model=model.name,
        model_path=str(model.path),
        model_sha256=model.sha256,
    )
    if not insist(lambda session: jobs.resolved(session, claim, spec)):
        raise Cancelled
    return replace(claim, spec=spec)


def _compute(claim: Claim, meter: Meter, beat: Beat, phases: Phases) -> None:
    """Compute the job and publish it; where memory runs out, once more with less."""
    try:
        _attempt(claim, meter, beat, phases, sparing=False)
    except OutOfMemory as error:
        logger.warning("job %s is run again with less: %s", claim.job_id, error)
        said = f"memory ran out in {meter.phase}; the job is run again, in less"
        warning = ("run_with_less_memory", said)
        insist(lambda session: jobs.warn(session, claim, *warning))
        _attempt(claim, meter, beat, phases, sparing=True)


def _attempt(
    claim: Claim, meter: Meter, beat: Beat, phases: Phases, *, sparing: bool
) -> None:
    def told(phase: str, fraction: float) -> None:
        if phase not in PHASES:
            raise Garbled(f"there is no phase {phase!r}")
        phases.enter(phase)
        beat.tell(meter.read(phase, fraction)._replace(trials=bench.trials))

    bench = JobsBench.of(claim, beat, _name())
    told("load", 0.0)
    with workdir.opened() as folder:
        start = relay.start("optimize", claim.spec, folder, sparing=sparing)
        try:
            done = relay.compute(start, bench, beat, told, folder)
        except (Refused, Crashed, OutOfMemory) as error:
            bench.failed()
            if isinstance(error, OutOfMemory):
                bench.give_back()  # the beat would keep them from the next try for ever
            raise
        phases.enter(STORE)
        _finalize(claim, done, folder)


def _help(spec: OptimizeSpec, bench: HelpersBench) -> None:
    with workdir.opened() as folder:
        start = relay.start("assist", spec, folder, sparing=False)
        relay.compute(start, bench, bench.beat, lambda phase, fraction: None, folder)


def _finalize(claim: Claim, done: Done, folder: Workdir) -> None:
    """Store what came out, then publish it with the job's success, at once."""
    if done.outcome is None:
        raise Garbled("a job has an outcome")
    outcome = done.outcome
    summary = done.summary | {"provenance": outputs.provenance(claim.spec)}
    if not insist(lambda session: jobs.finalize(session, claim)):
        raise Cancelled
    files = left(folder.output)
    for name, path in files:
        if name == outputs.REPORT:
            signing.sign(path)
    artifacts = [
        storage.put_file(claim.job_id, claim.attempt, name, path, outputs.kind_of(name))
        for name, path in files
    ]
    _close(
        claim,
        lambda session: jobs.succeed(session, claim, outcome, summary, artifacts),
    )


def left(output: Path) -> list[tuple[str, Path]]:
    """Return the name and the place of every file that the process left.

    Raises Garbled where something is no file of its own, or has no artifact's name.
    """
    found = []
    for path in sorted(output.rglob("*")):
        status, name = path.lstat(), path.relative_to(output).as_posix()
        if stat.S_ISDIR(status.st_mode):
            continue
        plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
        if not plain or not storage.ARTIFACT.fullmatch(name):
            raise Garbled(f"no artifact: {name[:100]!r}")
        found.append((name, path))
    if len(found) > MOST_FILES:
        raise Garbled(f"{len(found)} files")
    return found


def _close(claim: Claim, end: Callable[[Session], bool]) -> None:
    """Write the end, whatever the database does meanwhile; a cancel comes first.

    Nothing is written where the claim is void.
    """

    def write(session: Session) -> None:
        if not end(session):
            jobs.cancelled(session, claim)

    insist(write)
