"""What a receiver gets, for the `webhooks` section of the description of the API."""

from datetime import datetime
from typing import Annotated, Any

from fastapi import FastAPI, Header
from pydantic import BaseModel

from api.models import Status
from api.webhook_bodies import DISABLED, TEST, JobEvent

SAID = {
    JobEvent.CREATED: "A job was accepted",
    JobEvent.QUEUED: "A job waits for a worker, at first or again",
    JobEvent.STARTED: "A worker took a job",
    JobEvent.PHASE_CHANGED: "A job entered its next phase",
    JobEvent.ATTEMPT_LOST: "A job's worker fell silent",
    JobEvent.FINALIZING: "A job's artifacts are being stored",
    JobEvent.CANCELLING: "A job was asked to stop",
    JobEvent.SUCCEEDED: "A job succeeded; its outcome says how well",
    JobEvent.FAILED: "A job failed",
    JobEvent.CANCELLED: "A job was stopped by its owner",
    JobEvent.EXPIRED: "A job waited too long",
}


ANSWERS: dict[int | str, dict[str, Any]] = {
    410: {"description": "Never again: the endpoint is disabled"},
    "4XX": {"description": "It did not arrive; it is sent again later"},
}


class JobNews(BaseModel):
    """What happened to which job, and where to look. `GET /v1/jobs/{id}` has the rest.

    `job_url` is its page for people. `report_url` is there once the job succeeded. Both
    are absolute where the operator has said at which address the service is.
    `metadata` is null where it is too large.
    """

    job_id: str
    status: Status
    phase: str | None
    outcome: str | None
    error_code: str | None
    report_url: str | None
    job_url: str
    hardware: str
    model: str
    metadata: dict[str, str] | None


class JobWebhook(BaseModel):
    """The body of an endpoint whose format is `standard`."""

    type: JobEvent
    timestamp: datetime
    data: JobNews


class EndpointNews(BaseModel):
    """Which endpoint it is about, and why it was disabled."""

    endpoint_id: str
    url: str | None = None
    reason: str | None = None


class EndpointWebhook(BaseModel):
    """The body of what is about an endpoint itself."""

    type: str
    timestamp: datetime
    data: EndpointNews


Id = Annotated[
    str, Header(alias="webhook-id", description="Over all retries the same.")
]
Stamp = Annotated[
    int, Header(alias="webhook-timestamp", description="Unix time of the attempt.")
]
Signature = Annotated[
    str,
    Header(
        alias="webhook-signature",
        description="One `v1,…` for each valid secret, separated by spaces: the "
        "HMAC-SHA-256 of `id.timestamp.body`. Any library of Standard Webhooks "
        "verifies it.",
    ),
]


def install(app: FastAPI) -> None:
    """Describe every event that a receiver may get."""
    for event, said in SAID.items():
        _add(app, event.value, said, JobWebhook)
    _add(app, TEST, "Somebody tries an endpoint out", EndpointWebhook)
    said = "Another endpoint of the tenant was disabled: nothing arrived there"
    _add(app, DISABLED, said, EndpointWebhook)


def _add(app: FastAPI, event: str, said: str, model: type[BaseModel]) -> None:
    def received(
        body: Any, webhook_id: Id, timestamp: Stamp, signature: Signature
    ) -> None:
        """Answer with any 2xx within ten seconds; 410 disables the endpoint."""

    received.__annotations__["body"] = model
    app.webhooks.add_api_route(
        event,
        received,
        methods=["POST"],
        operation_id="on_" + event.replace(".", "_"),
        responses=ANSWERS,
        summary=said,
        status_code=204,
        tags=["webhooks"],
    )
