"""Create what a platform needs: idempotency, uploads, webhooks, audit, quotas."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    _create_audit_events()
    _create_idempotency_keys()
    _create_uploads()
    _create_webhook_endpoints()
    _create_upload_parts()
    _create_webhook_deliveries()
    _add_columns()
    _fill_hardware()


def _create_audit_events() -> None:
    op.create_table(
        "audit_events",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("action", sa.String(), nullable=False),
        sa.Column("target", sa.String(), nullable=True),
        sa.Column("request_id", sa.String(), nullable=True),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.id"],
            name=op.f("fk_audit_events_tenant_id_tenants"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_events")),
    )
    op.create_index(
        "ix_audit_events_tenant_id_id",
        "audit_events",
        ["tenant_id", "id"],
        unique=False,
    )


def _create_idempotency_keys() -> None:
    op.create_table(
        "idempotency_keys",
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("route", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("fingerprint", sa.String(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("headers", sa.JSON(), nullable=True),
        sa.Column("body", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.id"],
            name=op.f("fk_idempotency_keys_tenant_id_tenants"),
        ),
        sa.PrimaryKeyConstraint(
            "tenant_id", "route", "key", name=op.f("pk_idempotency_keys")
        ),
    )
    op.create_index(
        op.f("ix_idempotency_keys_expires_at"),
        "idempotency_keys",
        ["expires_at"],
        unique=False,
    )


def _create_uploads() -> None:
    op.create_table(
        "uploads",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("files", sa.JSON(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("part_bytes", sa.BigInteger(), nullable=False),
        sa.Column("keep_s", sa.Double(), nullable=True),
        sa.Column(
            "state",
            sa.Enum(
                "open",
                "checking",
                "complete",
                "failed",
                name="uploadstate",
                native_enum=False,
                length=16,
            ),
            nullable=False,
        ),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.Column("created_by", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_uploads_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_uploads")),
    )
    op.create_index(
        op.f("ix_uploads_expires_at"), "uploads", ["expires_at"], unique=False
    )
    op.create_index(
        "ix_uploads_tenant_id_id", "uploads", ["tenant_id", "id"], unique=False
    )


def _create_webhook_endpoints() -> None:
    op.create_table(
        "webhook_endpoints",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("url", sa.String(), nullable=False),
        sa.Column("description", sa.String(), nullable=False),
        sa.Column("format", sa.String(), nullable=False),
        sa.Column("events", sa.JSON(), nullable=False),
        sa.Column("secret", sa.String(), nullable=False),
        sa.Column("old_secret", sa.String(), nullable=True),
        sa.Column("old_secret_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("disabled_reason", sa.String(), nullable=True),
        sa.Column("failing_since", sa.DateTime(timezone=True), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.id"],
            name=op.f("fk_webhook_endpoints_tenant_id_tenants"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_endpoints")),
    )
    op.create_index(
        "ix_webhook_endpoints_tenant_id_id",
        "webhook_endpoints",
        ["tenant_id", "id"],
        unique=False,
    )


def _create_upload_parts() -> None:
    op.create_table(
        "upload_parts",
        sa.Column("upload_id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["upload_id"],
            ["uploads.id"],
            name=op.f("fk_upload_parts_upload_id_uploads"),
        ),
        sa.PrimaryKeyConstraint("upload_id", "number", name=op.f("pk_upload_parts")),
    )


def _create_webhook_deliveries() -> None:
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("endpoint_id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=True),
        sa.Column("message_id", sa.String(), nullable=False),
        sa.Column("event_type", sa.String(), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column(
            "state",
            sa.Enum(
                "pending",
                "delivered",
                "failed",
                name="deliverystate",
                native_enum=False,
                length=16,
            ),
            nullable=False,
        ),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("log", sa.JSON(), nullable=False),
        sa.Column("claimed_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("next_attempt_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["endpoint_id"],
            ["webhook_endpoints.id"],
            name=op.f("fk_webhook_deliveries_endpoint_id_webhook_endpoints"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.id"],
            name=op.f("fk_webhook_deliveries_tenant_id_tenants"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_deliveries")),
    )
    op.create_index(
        "ix_webhook_deliveries_endpoint_id_id",
        "webhook_deliveries",
        ["endpoint_id", "id"],
        unique=False,
    )
    op.create_index(
        "ix_webhook_deliveries_state_next_attempt_at",
        "webhook_deliveries",
        ["state", "next_attempt_at"],
        unique=False,
    )


def _add_columns() -> None:
    op.add_column(
        "api_keys",
        sa.Column("kind", sa.String(), server_default="personal", nullable=False),
    )
    op.add_column("api_keys", sa.Column("scopes", sa.JSON(), nullable=True))
    op.add_column(
        "api_keys",
        sa.Column("version", sa.Integer(), server_default="1", nullable=False),
    )
    op.add_column(
        "api_keys", sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True)
    )
    op.add_column(
        "artifacts",
        sa.Column("kind", sa.String(), server_default="file", nullable=False),
    )
    op.add_column(
        "artifacts", sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True)
    )
    op.add_column(
        "artifacts", sa.Column("purged_at", sa.DateTime(timezone=True), nullable=True)
    )
    op.add_column(
        "datasets", sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True)
    )
    op.add_column(
        "jobs", sa.Column("hardware", sa.String(), server_default="", nullable=False)
    )
    op.add_column(
        "jobs", sa.Column("priority", sa.Integer(), server_default="0", nullable=False)
    )
    op.add_column("jobs", sa.Column("run_limit_s", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("retried_from", sa.String(), nullable=True))
    op.add_column("jobs", sa.Column("created_by", sa.String(), nullable=True))
    op.add_column("jobs", sa.Column("request_id", sa.String(), nullable=True))
    op.add_column("jobs", sa.Column("traceparent", sa.String(), nullable=True))
    op.add_column("jobs", sa.Column("webhook_endpoint_id", sa.String(), nullable=True))
    op.add_column("jobs", sa.Column("warnings", sa.JSON(), nullable=True))
    op.add_column(
        "jobs", sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True)
    )
    op.create_index(
        "ix_jobs_status_hardware_tenant_id",
        "jobs",
        ["status", "hardware", "tenant_id"],
        unique=False,
    )
    op.add_column("models", sa.Column("details", sa.JSON(), nullable=True))
    op.add_column(
        "models",
        sa.Column("uploaded", sa.Boolean(), server_default=sa.false(), nullable=False),
    )
    op.add_column(
        "models", sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True)
    )
    op.add_column("tenants", sa.Column("max_queued", sa.Integer(), nullable=True))
    op.add_column("tenants", sa.Column("max_running", sa.Integer(), nullable=True))
    op.add_column(
        "tenants", sa.Column("served_at", sa.DateTime(timezone=True), nullable=True)
    )


def _fill_hardware() -> None:
    """Jobs of before name their device in the specification alone."""
    said = (
        "spec ->> 'hardware'"
        if op.get_bind().dialect.name == "postgresql"
        else "json_extract(spec, '$.hardware')"
    )
    op.execute(f"UPDATE jobs SET hardware = {said} WHERE hardware = ''")


def downgrade() -> None:
    _drop_columns()
    op.drop_index(
        "ix_webhook_deliveries_state_next_attempt_at", table_name="webhook_deliveries"
    )
    op.drop_index(
        "ix_webhook_deliveries_endpoint_id_id", table_name="webhook_deliveries"
    )
    op.drop_table("webhook_deliveries")
    op.drop_table("upload_parts")
    op.drop_index("ix_webhook_endpoints_tenant_id_id", table_name="webhook_endpoints")
    op.drop_table("webhook_endpoints")
    op.drop_index("ix_uploads_tenant_id_id", table_name="uploads")
    op.drop_index(op.f("ix_uploads_expires_at"), table_name="uploads")
    op.drop_table("uploads")
    op.drop_index(op.f("ix_idempotency_keys_expires_at"), table_name="idempotency_keys")
    op.drop_table("idempotency_keys")
    op.drop_index("ix_audit_events_tenant_id_id", table_name="audit_events")
    op.drop_table("audit_events")


def _drop_columns() -> None:
    op.drop_column("tenants", "served_at")
    op.drop_column("tenants", "max_running")
    op.drop_column("tenants", "max_queued")
    op.drop_column("models", "expires_at")
    op.drop_column("models", "uploaded")
    op.drop_column("models", "details")
    op.drop_index("ix_jobs_status_hardware_tenant_id", table_name="jobs")
    op.drop_column("jobs", "deleted_at")
    op.drop_column("jobs", "warnings")
    op.drop_column("jobs", "webhook_endpoint_id")
    op.drop_column("jobs", "traceparent")
    op.drop_column("jobs", "request_id")
    op.drop_column("jobs", "created_by")
    op.drop_column("jobs", "retried_from")
    op.drop_column("jobs", "run_limit_s")
    op.drop_column("jobs", "priority")
    op.drop_column("jobs", "hardware")
    op.drop_column("datasets", "expires_at")
    op.drop_column("artifacts", "purged_at")
    op.drop_column("artifacts", "expires_at")
    op.drop_column("artifacts", "kind")
    op.drop_column("api_keys", "expires_at")
    op.drop_column("api_keys", "version")
    op.drop_column("api_keys", "scopes")
    op.drop_column("api_keys", "kind")
