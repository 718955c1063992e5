"""Create what workers leave for whoever watches: counts of measurements, and GPUs."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.create_table(
        "trial_tallies",
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("result", sa.String(), nullable=False),
        sa.Column("precision", sa.String(), nullable=False),
        sa.Column("within_s", sa.Double(), nullable=False),
        sa.Column("total", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.id"],
            name=op.f("fk_trial_tallies_tenant_id_tenants"),
        ),
        sa.PrimaryKeyConstraint(
            "tenant_id",
            "result",
            "precision",
            "within_s",
            name=op.f("pk_trial_tallies"),
        ),
    )
    op.create_table(
        "gpus",
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("used_bytes", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("device", name=op.f("pk_gpus")),
    )


def downgrade() -> None:
    op.drop_table("gpus")
    op.drop_table("trial_tallies")
