"""The endpoints of webhook endpoints, and of what was delivered to them.

The secret is shown when it is made, at creation and at rotation, and never again. An
edit names the version it edits (`If-Match`).
"""

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from sqlalchemy.orm import Session

from api import db, etags, outbox, webhooks
from api.access import DB, Caller
from api.models import DeliveryState, WebhookDelivery, WebhookEndpoint
from api.schemas import Body, left_out
from api.strict import StrictRoute
from api.transitions import now
from api.webhook_bodies import DEFAULT, Format, JobEvent
from api.webhook_urls import MAX_LENGTH
from api.webhooks import Wanted

Url = Annotated[str, StringConstraints(min_length=1, max_length=MAX_LENGTH)]
Events = Annotated[
    list[Annotated[JobEvent, Field(strict=False)]],
    Field(min_length=1, max_length=len(JobEvent)),
]
Shape = Annotated[Format, Field(strict=False)]
Note = Annotated[str, StringConstraints(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]
IfMatch = Annotated[str | None, Header(max_length=200)]
Limit = Annotated[int, Query(ge=1, le=100)]
Cursor = Annotated[str | None, Query(max_length=200)]

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["webhooks"])


class EndpointRequest(Body):
    """Where webhooks should go. Without `events`: when a job has ended."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "url": "https://hooks.example.com/precision",
                    "events": ["job.succeeded", "job.failed"],
                    "description": "the portal's scorecards",
                }
            ]
        }
    )

    url: Url
    events: Events = Field(default_factory=lambda: list(DEFAULT))
    description: Note = ""
    format: Shape = Format.STANDARD


class EndpointChange(Body):
    """What to change. Disabling gives up what waits to be delivered."""

    url: Url = left_out("")
    events: Events = Field(default_factory=lambda: list(DEFAULT))
    description: Note = left_out("")
    format: Shape = left_out(Format.STANDARD)
    enabled: bool = left_out(True)


class EndpointView(BaseModel):
    """An endpoint, without its secret."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: str = "webhook_endpoint"
    url: str
    events: list[str]
    description: str
    format: Format
    enabled: bool
    disabled_reason: str | None
    failing_since: datetime | None
    old_secret_expires_at: datetime | None
    created_at: datetime
    updated_at: datetime


class NewSecretView(EndpointView):
    """An endpoint with its new secret, which is shown this once."""

    secret: str


class EndpointPage(BaseModel):
    """Some endpoints, the newest first; `next_cursor` is the next page's `after`."""

    object: str = "list"
    data: list[EndpointView]
    has_more: bool
    next_cursor: str | None


class AttemptView(BaseModel):
    """One attempt: the receiver's status, or why there is none."""

    at: datetime
    status: int | None
    error: str | None
    duration_s: float


class DeliveryView(BaseModel):
    """One event for one endpoint, with every attempt so far."""

    id: str
    object: str = "webhook_delivery"
    endpoint_id: str
    job_id: str | None
    message_id: str
    event_type: str
    state: DeliveryState
    attempts: list[AttemptView]
    next_attempt_at: datetime | None
    created_at: datetime
    finished_at: datetime | None


class DeliveryPage(BaseModel):
    """Some deliveries, the newest first; `next_cursor` is the next page's `after`."""

    object: str = "list"
    data: list[DeliveryView]
    has_more: bool
    next_cursor: str | None


@router.post("/webhook_endpoints", status_code=201)
def create_webhook_endpoint(
    body: EndpointRequest, caller: Caller, response: Response
) -> NewSecretView:
    """Add an endpoint. Its secret signs what it gets, and is shown this once."""
    wanted = Wanted(body.url, body.events, body.description, body.format)
    with db.transaction() as session:
        row = webhooks.create(session, caller.tenant_id, caller.actor, wanted)
    response.headers["Location"] = f"/v1/webhook_endpoints/{row.id}"
    _tag(row, response)
    return NewSecretView.model_validate(row)


@router.get("/webhook_endpoints")
def list_webhook_endpoints(
    caller: Caller, session: DB, limit: Limit = 20, after: Cursor = None
) -> EndpointPage:
    """List the tenant's endpoints, the newest first."""
    rows, cursor = webhooks.page(session, caller.tenant_id, limit, after)
    found = [EndpointView.model_validate(row) for row in rows]
    return EndpointPage(data=found, has_more=cursor is not None, next_cursor=cursor)


@router.get("/webhook_endpoints/{endpoint_id}")
def get_webhook_endpoint(
    endpoint_id: str, caller: Caller, session: DB, response: Response
) -> EndpointView:
    """Show one endpoint. Its ETag is what an edit must name."""
    row = webhooks.get(session, caller.tenant_id, endpoint_id)
    _tag(row, response)
    return EndpointView.model_validate(row)


@router.patch("/webhook_endpoints/{endpoint_id}")
def update_webhook_endpoint(
    endpoint_id: str,
    body: EndpointChange,
    caller: Caller,
    response: Response,
    if_match: IfMatch = None,
) -> EndpointView:
    """Change an endpoint, or enable it again. Its secret stays."""
    wanted = {name: getattr(body, name) for name in body.model_fields_set}
    with db.transaction() as session:
        row = webhooks.hold(session, caller.tenant_id, endpoint_id)
        etags.require_match(if_match, row.version)
        webhooks.change(session, caller.actor, row, wanted)
    _tag(row, response)
    return EndpointView.model_validate(row)


@router.delete("/webhook_endpoints/{endpoint_id}", status_code=204)
def delete_webhook_endpoint(endpoint_id: str, caller: Caller) -> None:
    """Delete an endpoint, what waits for it and the log of its deliveries."""
    with db.transaction() as session:
        row = webhooks.hold(session, caller.tenant_id, endpoint_id)
        webhooks.delete(session, caller.actor, row)


@router.post("/webhook_endpoints/{endpoint_id}/rotate_secret")
def rotate_webhook_secret(
    endpoint_id: str, caller: Caller, response: Response
) -> NewSecretView:
    """Make a new secret. Both sign for a day, so that no receiver misses a webhook."""
    with db.transaction() as session:
        row = webhooks.hold(session, caller.tenant_id, endpoint_id)
        webhooks.rotate(session, caller.actor, row)
    _tag(row, response)
    return NewSecretView.model_validate(row)


@router.post("/webhook_endpoints/{endpoint_id}/test", status_code=202)
def test_webhook_endpoint(endpoint_id: str, caller: Caller) -> DeliveryView:
    """Send a `webhook.test` event by the road of all others."""
    with db.transaction() as session:
        row = webhooks.hold(session, caller.tenant_id, endpoint_id)
        delivery = webhooks.test(session, row)
    return _delivery(delivery)


@router.get("/webhook_endpoints/{endpoint_id}/deliveries")
def list_webhook_deliveries(
    endpoint_id: str,
    caller: Caller,
    session: DB,
    limit: Limit = 20,
    after: Cursor = None,
    state: DeliveryState | None = None,
) -> DeliveryPage:
    """List what was delivered, or was not, with every attempt."""
    row = webhooks.get(session, caller.tenant_id, endpoint_id)
    rows, cursor = outbox.page(session, row, limit, after, state)
    found = [_delivery(row) for row in rows]
    return DeliveryPage(data=found, has_more=cursor is not None, next_cursor=cursor)


@router.post("/deliveries/{delivery_id}/replay", status_code=202)
def replay_webhook_delivery(delivery_id: str, caller: Caller) -> DeliveryView:
    """Send it once more under the same `webhook-id`, whatever became of it."""
    with db.transaction() as session:
        row = _replayed(session, caller.tenant_id, delivery_id)
    return _delivery(row)


def _replayed(session: Session, tenant_id: str, delivery_id: str) -> WebhookDelivery:
    return outbox.replay(session, tenant_id, delivery_id, now(session))


def _tag(row: WebhookEndpoint, response: Response) -> None:
    response.headers["ETag"] = etags.etag(row.version)


def _delivery(row: WebhookDelivery) -> DeliveryView:
    waits = row.state is DeliveryState.PENDING
    fields: dict[str, Any] = {
        "id": row.id,
        "endpoint_id": row.endpoint_id,
        "job_id": row.job_id,
        "message_id": row.message_id,
        "event_type": row.event_type,
        "state": row.state,
        "attempts": [AttemptView.model_validate(entry) for entry in row.log],
        "next_attempt_at": row.next_attempt_at if waits else None,
        "created_at": row.created_at,
        "finished_at": row.finished_at,
    }
    return DeliveryView(**fields)
