"""What schemathesis does not know: JSON lines, ids of things that are there, and that
waiting is not the point.
"""

import json
import os
import re
import zlib
from typing import Any

import schemathesis


@schemathesis.serializer("application/jsonl")
def jsonl(context: Any, value: Any) -> Any:
    """Send what was thought of as it is."""
    return value if isinstance(value, bytes) else str(value).encode()


THERE: dict[str, str] = json.loads(os.environ.get("FUZZ_IDS", "{}"))


@schemathesis.hook
def filter_failure(context: Any, failure: Any, case: Any, response: Any) -> bool:
    """A header that nobody knows is no error, whatever the description lists."""
    return "x-schemathesis-unknown-property" not in case.headers


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Ask for what there is half of the time, and wait for nothing."""
    made_before = case.meta is not None and case.meta.phase.name.value == "stateful"
    for name, value in () if made_before else case.path_parameters.items():
        chosen = zlib.crc32(str(value).encode()) % 2
        if name in THERE and chosen and case.method != "DELETE":
            case.path_parameters[name] = THERE[name]
    if re.fullmatch(r"[1-9]|[1-5]\d|60", str(case.query.get("wait"))):
        case.query["wait"] = 0
    for name in [name for name in case.headers if name.lower() == "prefer"]:
        case.headers[name] = re.sub(r"wait\s*=\s*\d+", "wait=0", case.headers[name])
