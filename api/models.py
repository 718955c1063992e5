"""The tables."""

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index, Text, false, text
from sqlalchemy.orm import Mapped, mapped_column

from api import ids
from api.base import Base, now, words
from api.watched_models import Gpu, TrialTally

__all__ = ["Base", "Gpu", "TrialTally", "now"]


class Tenant(Base):
    """Who owns things. Every other row belongs to one, or to all."""

    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: ids.new("ten"))
    name: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime] = mapped_column(default=now)
    max_queued: Mapped[int | None]  # None: the setting's
    max_running: Mapped[int | None]
    served_at: Mapped[datetime | None]  # when a worker last took a job of its


class ApiKey(Base):
    """A key's hash. The key itself is shown once and stored nowhere."""

    __tablename__ = "api_keys"

    kid: Mapped[str] = mapped_column(primary_key=True)
    sha256: Mapped[str]
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    name: Mapped[str]
    kind: Mapped[str] = mapped_column(default="personal", server_default="personal")
    scopes: Mapped[list[Any] | None]  # None: all but admin, as before scopes
    version: Mapped[int] = mapped_column(default=1, server_default="1")  # its ETag
    api_version: Mapped[str | None]  # that it is answered in; None: the newest
    created_at: Mapped[datetime] = mapped_column(default=now)
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]


class RegisteredModel(Base):
    """A folder of weights under the name that callers use."""

    __tablename__ = "models"
    __table_args__ = (
        Index("uq_models_tenant_id_name", "tenant_id", "name", unique=True),
        Index(  # NULLs differ from each other, so shared names need their own index
            "uq_models_shared_name",
            "name",
            unique=True,
            sqlite_where=text("tenant_id IS NULL"),
            postgresql_where=text("tenant_id IS NULL"),
        ),
    )

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: ids.new("mdl"))
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str]
    path: Mapped[str]
    stamp: Mapped[str]  # changes when a file of the folder does
    sha256: Mapped[str]
    architecture: Mapped[str]
    parameters: Mapped[int] = mapped_column(BigInteger)
    stored_bytes: Mapped[int] = mapped_column(BigInteger)
    dtypes: Mapped[dict[str, Any]]
    details: Mapped[dict[str, Any] | None]  # tensors, warnings, files with digests
    uploaded: Mapped[bool] = mapped_column(default=False, server_default=false())
    created_at: Mapped[datetime] = mapped_column(default=now)
    expires_at: Mapped[datetime | None]


class Dataset(Base):
    """An uploaded JSONL file, checked."""

    __tablename__ = "datasets"
    __table_args__ = (
        Index("uq_datasets_tenant_id_name", "tenant_id", "name", unique=True),
    )

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: ids.new("ds"))
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str]
    path: Mapped[str]
    sha256: Mapped[str]
    samples: Mapped[int]
    bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(default=now)
    expires_at: Mapped[datetime | None]


class Status(StrEnum):
    """A job goes down this list; the last four are final."""

    QUEUED = "queued"
    RUNNING = "running"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


FINAL = (Status.SUCCEEDED, Status.FAILED, Status.CANCELLED, Status.EXPIRED)
HELD = (Status.RUNNING, Status.FINALIZING, Status.CANCELLING)  # by a worker


class Job(Base):
    """One optimization, from request to report."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index("ix_jobs_tenant_id_id", "tenant_id", "id"),
        Index("ix_jobs_tenant_id_status_id", "tenant_id", "status", "id"),
        Index("ix_jobs_status_hardware_tenant_id", "status", "hardware", "tenant_id"),
    )

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: ids.new("job"))
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    status: Mapped[Status] = mapped_column(words(Status), default=Status.QUEUED)
    body: Mapped[dict[str, Any]]  # the request as the caller wrote it
    spec: Mapped[dict[str, Any]]  # the same, resolved
    hardware: Mapped[str] = mapped_column(default="", server_default="")
    priority: Mapped[int] = mapped_column(default=0, server_default="0")  # high first
    run_limit_s: Mapped[float | None]  # None: the setting's
    retried_from: Mapped[str | None]
    created_by: Mapped[str | None]  # the key's id, or the token's subject
    request_id: Mapped[str | None]
    traceparent: Mapped[str | None]  # W3C: the caller's trace goes on in the worker
    webhook_endpoint_id: Mapped[str | None]  # None: every endpoint that subscribed
    warnings: Mapped[list[Any] | None]
    attempt: Mapped[int] = mapped_column(default=0)
    attempts_lost: Mapped[int] = mapped_column(default=0)
    worker: Mapped[str | None]
    lease_expires_at: Mapped[datetime | None]
    phase: Mapped[str | None]
    percent: Mapped[float] = mapped_column(default=0.0)
    trials_done: Mapped[int] = mapped_column(default=0, server_default="0")
    trials_planned: Mapped[int] = mapped_column(default=0, server_default="0")
    eta_s: Mapped[float | None]
    outcome: Mapped[str | None]
    error: Mapped[dict[str, Any] | None]
    summary: Mapped[dict[str, Any] | None]
    last_seq: Mapped[int] = mapped_column(default=0)
    progressed_at: Mapped[datetime | None]  # of the last progress event
    rung_at: Mapped[datetime]  # for versions before 0003; no longer read
    created_at: Mapped[datetime]
    queued_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    finalizing_at: Mapped[datetime | None]
    cancel_requested_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    expires_at: Mapped[datetime]
    deleted_at: Mapped[datetime | None]  # the row stays as a tombstone


class JobEvent(Base):
    """What happened to a job; `seq` has no gaps."""

    __tablename__ = "job_events"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    type: Mapped[str]
    at: Mapped[datetime]
    details: Mapped[dict[str, Any]]


class Artifact(Base):
    """A file that a job leaves."""

    __tablename__ = "artifacts"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    attempt: Mapped[int]
    sha256: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger)
    media_type: Mapped[str]
    kind: Mapped[str] = mapped_column(default="file", server_default="file")
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    purged_at: Mapped[datetime | None]  # the bytes are gone, what they were is known


class KeptResult(Base):
    """What a piece of a job came to; whoever asks for the same key need not compute.

    Keys are digests of everything that decides the result. A tenant reads its own
    alone: a result that is there at once would tell what others ask for.
    """

    __tablename__ = "results"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    text: Mapped[str | None] = mapped_column(Text())  # JSON; None: a file holds it
    bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime]
    last_used_at: Mapped[datetime] = mapped_column(index=True)


class PieceState(StrEnum):
    """A piece goes down this list; one whose worker fell silent is as if queued."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"  # its result is kept
    FAILED = "failed"  # a helper could not; the job's own worker tries


class JobPiece(Base):
    """A part of a running job that any worker may compute. Gone when it was read."""

    __tablename__ = "pieces"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    place: Mapped[int]  # in the list that the job asked for
    kind: Mapped[str]
    payload: Mapped[dict[str, Any]]
    state: Mapped[PieceState] = mapped_column(
        words(PieceState),
        default=PieceState.QUEUED,
    )
    attempt: Mapped[int] = mapped_column(default=0)
    worker: Mapped[str | None]
    heartbeat_at: Mapped[datetime | None]
    error: Mapped[str | None]


class IdempotencyKey(Base):
    """What a request with this key was answered, to answer it again alike."""

    __tablename__ = "idempotency_keys"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    route: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    fingerprint: Mapped[str]  # of the body: the same key must mean the same
    status: Mapped[int | None]  # None: it is being answered
    headers: Mapped[dict[str, Any] | None]
    body: Mapped[str | None] = mapped_column(Text())
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime] = mapped_column(index=True)


class UploadState(StrEnum):
    """An upload goes down this list."""

    OPEN = "open"  # parts are coming in
    CHECKING = "checking"  # all are there; they are put together and looked at
    COMPLETE = "complete"
    FAILED = "failed"  # what came in is no model, or no dataset


class Upload(Base):
    """A model or a dataset on its way in, part by part."""

    __tablename__ = "uploads"
    __table_args__ = (Index("ix_uploads_tenant_id_id", "tenant_id", "id"),)

    id: Mapped[str] = mapped_column(primary_key=True)  # that of what it becomes
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    kind: Mapped[str]  # model, dataset, or folder: one that is there, to be looked at
    name: Mapped[str]
    files: Mapped[list[Any]]  # {path, bytes}, in the order of their parts
    bytes: Mapped[int] = mapped_column(BigInteger)
    part_bytes: Mapped[int] = mapped_column(BigInteger)
    keep_s: Mapped[float | None]  # what it becomes expires so late; None: never
    state: Mapped[UploadState] = mapped_column(
        words(UploadState),
        default=UploadState.OPEN,
    )
    error: Mapped[dict[str, Any] | None]
    created_by: Mapped[str | None]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime] = mapped_column(index=True)


class UploadPart(Base):
    """A part that lies whole in the storage."""

    __tablename__ = "upload_parts"

    upload_id: Mapped[str] = mapped_column(ForeignKey("uploads.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)  # from 1
    sha256: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime]


class WebhookEndpoint(Base):
    """A URL that wants to hear of events."""

    __tablename__ = "webhook_endpoints"
    __table_args__ = (Index("ix_webhook_endpoints_tenant_id_id", "tenant_id", "id"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: ids.new("we"))
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    url: Mapped[str]
    description: Mapped[str] = mapped_column(default="")
    format: Mapped[str] = mapped_column(default="standard")
    events: Mapped[list[Any]]  # event types
    secret: Mapped[str]  # signs; so it cannot be a hash
    old_secret: Mapped[str | None]  # signs as well, until it expires
    old_secret_expires_at: Mapped[datetime | None]
    enabled: Mapped[bool] = mapped_column(default=True)
    disabled_reason: Mapped[str | None]
    failing_since: Mapped[datetime | None]  # no delivery arrived since
    version: Mapped[int] = mapped_column(default=1)  # its ETag
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]


class DeliveryState(StrEnum):
    """A delivery waits until it arrived, or nobody tries any more."""

    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"


class WebhookDelivery(Base):
    """One event for one endpoint: the outbox, and the log of every attempt."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        Index(
            "ix_webhook_deliveries_state_next_attempt_at", "state", "next_attempt_at"
        ),
        Index("ix_webhook_deliveries_endpoint_id_id", "endpoint_id", "id"),
    )

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: ids.new("dlv"))
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    endpoint_id: Mapped[str] = mapped_column(
        ForeignKey("webhook_endpoints.id", ondelete="CASCADE")
    )
    job_id: Mapped[str | None]
    message_id: Mapped[str]  # `webhook-id`: the same over retries and replays
    event_type: Mapped[str]
    payload: Mapped[str] = mapped_column(Text())  # the bytes that are signed
    state: Mapped[DeliveryState] = mapped_column(
        words(DeliveryState),
        default=DeliveryState.PENDING,
    )
    attempts: Mapped[int] = mapped_column(default=0)
    log: Mapped[list[Any]]  # {at, status, error, duration_s} of each attempt
    claimed_until: Mapped[datetime | None]  # a postman who fell silent loses it then
    next_attempt_at: Mapped[datetime]
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]


class AuditEvent(Base):
    """Who did what to which thing. Rows are only added."""

    __tablename__ = "audit_events"
    __table_args__ = (Index("ix_audit_events_tenant_id_id", "tenant_id", "id"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: ids.new("aud"))
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    at: Mapped[datetime]
    actor: Mapped[str]  # a key's id, a token's subject, or the command line
    action: Mapped[str]  # noun.verb, as `api_key.created`
    target: Mapped[str | None]  # the id of the thing
    request_id: Mapped[str | None]
    details: Mapped[dict[str, Any]]


class EndedSession(Base):
    """A session of the pages that somebody signed out of before its time."""

    __tablename__ = "ended_sessions"

    sha256: Mapped[str] = mapped_column(primary_key=True)  # of its cookie
    expires_at: Mapped[datetime] = mapped_column(index=True)  # it would have ended then
