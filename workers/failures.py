"""What went wrong, as the job's owner is told: {code, category, retryable, message, phase}."""

import errno
import re
from typing import Any

from optimizer.errors import OptimizerError

OUT_OF_MEMORY = {
    "code": "device_out_of_memory",
    "category": "hardware",
    "retryable": False,
    "message": "the worker ran out of memory; ask for fewer or shorter sequences",
}
DEFECT = {
    "code": "internal_error",
    "category": "platform",
    "retryable": True,
    "message": "the worker met a defect of its own; the operator's log has the details",
}
NO_ROOM = {
    "code": "storage_write_failed",
    "category": "platform",
    "retryable": True,
    "message": "the worker could not write its files; send the request again",
}
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS))
MOST_CHARACTERS = 2000  # of a message, which may quote what the owner uploaded


def explain(error: BaseException, phase: str) -> dict[str, Any]:
    """Return the error that the job's owner sees. Our own defects stay in the log."""
    if isinstance(error, OptimizerError):
        found = {
            "code": error.code,
            "category": error.category,
            "retryable": False,
            "message": str(error)[:MOST_CHARACTERS],
        }
        if layer := re.search(r"\blayers\.\d+", getattr(error, "where", "")):
            found["layer"] = layer.group()
    elif _is_out_of_memory(error):
        found = dict(OUT_OF_MEMORY)
    elif isinstance(error, OSError) and error.errno in _FULL:
        found = dict(NO_ROOM)
    else:
        found = dict(DEFECT)
    return {**found, "phase": phase}


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. By name, for torch is not to be imported for this."""
    named = type(error).__name__ == "OutOfMemoryError"
    allocator = isinstance(error, RuntimeError) and "can't allocate memory" in str(
        error
    )
    return isinstance(error, MemoryError) or named or allocator
