"""Create ended sessions: whoever signed out is out, whatever cookie is left."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "ended_sessions",
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_ended_sessions")),
    )
    op.create_index(
        op.f("ix_ended_sessions_expires_at"),
        "ended_sessions",
        ["expires_at"],
        unique=False,
    )


def downgrade() -> None:
    op.drop_index(op.f("ix_ended_sessions_expires_at"), table_name="ended_sessions")
    op.drop_table("ended_sessions")
