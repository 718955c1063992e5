"""The spans of a job: its own under the request's, and its phases under that."""

from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Self

from api import tracing
from api.queue import RUN_JOB
from api.tracing import Attributes, Span
from api.transitions import Claim


def of(claim: Claim) -> AbstractContextManager[Span]:
    """Make the span of an attempt; the job's row says where its trace goes on."""
    about: Attributes = {
        "precision.job_id": claim.job_id,
        "precision.attempt": claim.attempt,
        "precision.request_id": claim.request_id,
        "precision.hardware": claim.spec.hardware,
        "precision.task": claim.spec.task,
    }
    return tracing.span(RUN_JOB, "consumer", claim.traceparent, about)


class Phases:
    """One span for each phase, which ends where the next one begins."""

    def __init__(self, job: Span) -> None:
        self._job = job
        self._phase = ""
        self._open = ExitStack()

    def enter(self, phase: str) -> None:
        """Begin a phase, unless it is the one that is under way."""
        if phase == self._phase:
            return
        self._open.close()
        self._phase = phase
        parent = self._job.traceparent
        self._open.enter_context(tracing.span(phase, "internal", parent))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.__exit__(kind, error, trace)
