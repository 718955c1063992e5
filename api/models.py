"""The tables."""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    Enum,
    ForeignKey,
    Index,
    MetaData,
    Text,
    TypeDecorator,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from api import ids


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime in UTC, on SQLite as well, which stores no zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(
        self, value: datetime | None, dialect: Dialect
    ) -> datetime | None:
        """Refuse naive datetimes: nobody knows what they mean."""
        if value is not None and value.tzinfo is None:
            raise ValueError("naive datetime")
        return value and value.astimezone(UTC)

    def process_result_value(
        self, value: datetime | None, dialect: Dialect
    ) -> datetime | None:
        """Name the zone again."""
        if value is None or value.tzinfo:
            return value and value.astimezone(UTC)
        return value.replace(tzinfo=UTC)


class Base(DeclarativeBase):
    """Constraint names are fixed, so that a migration can name them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012  SQLAlchemy reads it as a class attribute
        datetime: UtcDateTime,
        dict[str, Any]: JSON(none_as_null=True),
    }


def now() -> datetime:
    """Return this machine's time, aware."""
    return datetime.now(UTC)


class Tenant(Base):
    """Who owns things. Every other row belongs to one, or to all."""

    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: ids.new("ten"))
    name: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime] = mapped_column(default=now)


class ApiKey(Base):
    """A key's hash. The key itself is shown once and stored nowhere."""

    __tablename__ = "api_keys"

    kid: Mapped[str] = mapped_column(primary_key=True)
    sha256: Mapped[str]
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    name: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=now)
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
    created_at: Mapped[datetime] = mapped_column(default=now)


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
    __table_args__ = (Index("ix_jobs_tenant_id_id", "tenant_id", "id"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: ids.new("job"))
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    status: Mapped[Status] = mapped_column(
        Enum(
            Status,
            native_enum=False,
            length=16,
            values_callable=lambda e: [s.value for s in e],
        ),
        default=Status.QUEUED,
        index=True,
    )
    body: Mapped[dict[str, Any]]  # the request as the caller wrote it
    spec: Mapped[dict[str, Any]]  # the same, resolved
    attempt: Mapped[int] = mapped_column(default=0)
    attempts_lost: Mapped[int] = mapped_column(default=0)
    worker: Mapped[str | None]
    lease_expires_at: Mapped[datetime | None]
    phase: Mapped[str | None]
    percent: Mapped[float] = mapped_column(default=0.0)
    eta_s: Mapped[float | None]
    outcome: Mapped[str | None]
    error: Mapped[dict[str, Any] | None]
    summary: Mapped[dict[str, Any] | None]
    last_seq: Mapped[int] = mapped_column(default=0)
    progressed_at: Mapped[datetime | None]  # of the last progress event
    rung_at: Mapped[datetime]
    created_at: Mapped[datetime]
    queued_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    finalizing_at: Mapped[datetime | None]
    cancel_requested_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    expires_at: Mapped[datetime]


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
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    attempt: Mapped[int]
    sha256: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger)
    media_type: Mapped[str]
    created_at: Mapped[datetime]


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
        Enum(
            PieceState,
            native_enum=False,
            length=16,
            values_callable=lambda e: [s.value for s in e],
        ),
        default=PieceState.QUEUED,
    )
    attempt: Mapped[int] = mapped_column(default=0)
    worker: Mapped[str | None]
    heartbeat_at: Mapped[datetime | None]
    error: Mapped[str | None]
