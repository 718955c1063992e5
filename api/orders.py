"""What a request says about its job beside what to compute."""

import re
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any

from api.settings import settings

TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class Order:
    """When a job is to run, how long it may, who asked, and who hears of it."""

    priority: int = 0
    expires_in_s: float | None = None  # None: the setting's
    run_limit_s: float | None = None
    webhook_endpoint_id: str | None = None
    retried_from: str | None = None
    created_by: str | None = None
    request_id: str | None = None
    traceparent: str | None = None

    def columns(self, at: datetime) -> dict[str, Any]:
        """Return the columns of a job that is made at `at`."""
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        limit_s = said.pop("expires_in_s") or settings().queue_limit_s
        return {**said, "expires_at": at + timedelta(seconds=limit_s)}


def traceparent(header: str | None) -> str | None:
    """Return the caller's place in a trace, W3C; None: there is none that is valid."""
    if header is None or not TRACEPARENT.fullmatch(header.strip()):
        return None
    _, trace, span, _ = header.strip().split("-")
    return header.strip() if int(trace, 16) and int(span, 16) else None


PLAIN = Order()
