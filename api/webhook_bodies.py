"""What a webhook says: thin, and in the words of whoever reads it.

The bytes are made once, when something happens, and every attempt sends the same.
"""

import json
from datetime import datetime
from enum import StrEnum
from typing import Any

from api.models import FINAL, Job, Status
from api.settings import settings

Json = dict[str, Any]

MAX_BYTES = 20_000  # Standard Webhooks asks for less than 20 kB
TEST = "webhook.test"
DISABLED = "webhook_endpoint.disabled"


class JobEvent(StrEnum):
    """What an endpoint may subscribe to."""

    CREATED = "job.created"
    QUEUED = "job.queued"
    STARTED = "job.started"
    PHASE_CHANGED = "job.phase_changed"
    ATTEMPT_LOST = "job.attempt_lost"
    FINALIZING = "job.finalizing"
    CANCELLING = "job.cancelling"
    SUCCEEDED = "job.succeeded"
    FAILED = "job.failed"
    CANCELLED = "job.cancelled"
    EXPIRED = "job.expired"


SUBSCRIBABLE = frozenset(event.value for event in JobEvent)
DEFAULT = (JobEvent.SUCCEEDED, JobEvent.FAILED, JobEvent.CANCELLED, JobEvent.EXPIRED)


class Format(StrEnum):
    """The shape of a body."""

    STANDARD = "standard"  # Standard Webhooks: type, timestamp, data
    PORT = "port"  # the update of an action run, as Port's API takes it
    SLACK = "slack"  # a message, as Slack's incoming webhooks take it


def of_job(job: Job, kind: str, at: datetime) -> Json:
    """Return what happened to a job, and where to look."""
    data = {
        "job_id": job.id,
        "status": job.status.value,
        "phase": job.phase,
        "outcome": job.outcome,
        "error_code": job.error["code"] if job.error else None,
        "report_url": _report_url(job),
        "job_url": _url(f"/ui/jobs/{job.id}"),
        "hardware": job.hardware,
        "model": job.spec.get("model"),
        "metadata": job.body.get("metadata", {}),
    }
    return event(kind, at, data)


def event(kind: str, at: datetime, data: Json) -> Json:
    """Return an event as Standard Webhooks has it."""
    timestamp = at.isoformat().replace("+00:00", "Z")
    return {"type": kind, "timestamp": timestamp, "data": data}


def render(happened: Json, shape: str) -> str:
    """Return the body in an endpoint's format, always of less than 20 kB.

    Metadata may be large; where it is too much, it is null, and the job has it.
    """
    text = _dumps(_SHAPES[Format(shape)](happened))
    if len(text.encode()) < MAX_BYTES:
        return text
    thin = {**happened, "data": {**happened["data"], "metadata": None}}
    return _dumps(_SHAPES[Format(shape)](thin))


def _report_url(job: Job) -> str | None:
    if job.status is not Status.SUCCEEDED:
        return None
    return _url(f"/v1/jobs/{job.id}/report")


def _url(path: str) -> str:
    """Return an address; it is a path where nobody said what `public_url` is."""
    return settings().public_url.rstrip("/") + path


def _standard(happened: Json) -> Json:
    return happened


def _slack(happened: Json) -> Json:
    link = happened["data"].get("job_url") or ""
    more = f"\n<{_escaped(link)}|Open the job>" if link.startswith("http") else ""
    return {"text": _escaped(_sentence(happened)) + more}


def _port(happened: Json) -> Json:
    """Only a final state has a `status`: Port knows SUCCESS and FAILURE alone."""
    data = happened["data"]
    body: Json = {"statusLabel": happened["type"], "summary": _sentence(happened)}
    if data.get("status") in {status.value for status in FINAL}:
        succeeded = data["status"] == Status.SUCCEEDED
        body["status"] = "SUCCESS" if succeeded else "FAILURE"
    links = [data.get("job_url"), data.get("report_url")]
    if found := [link for link in links if (link or "").startswith("http")]:
        body["link"] = found
    return {**body, "externalRunId": data.get("job_id") or data.get("endpoint_id")}


def _sentence(happened: Json) -> str:
    data = happened["data"]
    if "job_id" not in data:
        reason = f": {data['reason']}" if "reason" in data else ""
        return f"{happened['type']} {data['endpoint_id']}{reason}"
    words = f"{data['job_id']} {happened['type'].removeprefix('job.')}"
    if why := data["outcome"] or data["error_code"]:
        words += f": {why}"
    return f"{words} ({data['model']} on {data['hardware']})"


def _escaped(text: str) -> str:
    """Escape what Slack reads as markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _dumps(body: Json) -> str:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


_SHAPES = {Format.STANDARD: _standard, Format.PORT: _port, Format.SLACK: _slack}
