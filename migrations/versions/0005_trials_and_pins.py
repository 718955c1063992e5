"""Add how many measurements a job has, a key's version of the API, an index of files."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    for name in ("trials_done", "trials_planned"):
        op.add_column(
            "jobs", sa.Column(name, sa.Integer(), server_default="0", nullable=False)
        )
    op.add_column("api_keys", sa.Column("api_version", sa.String(), nullable=True))
    op.create_index("ix_artifacts_tenant_id", "artifacts", ["tenant_id"])


def downgrade() -> None:
    op.drop_index("ix_artifacts_tenant_id", table_name="artifacts")
    op.drop_column("api_keys", "api_version")
    op.drop_column("jobs", "trials_planned")
    op.drop_column("jobs", "trials_done")
