"""Count a tenant's waiting jobs by themselves, however many others wait."""

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    # With the id last, lists of one status come in their order too.
    columns = ["tenant_id", "status", "id"]
    op.create_index("ix_jobs_tenant_id_status_id", "jobs", columns)
    # `ix_jobs_status_hardware_tenant_id` begins with the status as well.
    op.drop_index("ix_jobs_status", table_name="jobs")


def downgrade() -> None:
    op.create_index("ix_jobs_status", "jobs", ["status"])
    op.drop_index("ix_jobs_tenant_id_status_id", table_name="jobs")
