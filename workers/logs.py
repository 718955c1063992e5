"""What a worker logs: one JSON object a line, with the job's and its request's ids.

So a line of the API and one of a worker are found by the same `request_id`.
"""

import logging
import sys
from contextlib import AbstractContextManager

import structlog

from api.transitions import Claim

_BEFORE: list[structlog.typing.Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
]


def configure(level: str) -> None:
    """Write what this process logs, and the libraries in it, to stderr."""
    structlog.configure(
        processors=[*_BEFORE, structlog.processors.JSONRenderer()],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(level),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *_BEFORE],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())


def of(claim: Claim) -> AbstractContextManager[object]:
    """Name the job and its request in every line that is logged in the block."""
    ids = {
        "job_id": claim.job_id,
        "attempt": claim.attempt,
        "request_id": claim.request_id,
        "traceparent": claim.traceparent,
    }
    known = {name: value for name, value in ids.items() if value is not None}
    return structlog.contextvars.bound_contextvars(**known)
