"""Jobs of other kinds than fine-tuning, and fine-tuning that continues from a tuned model."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Added in place: SQLite would remake the table for more, and other tables point at it.
    op.add_column(
        "jobs",
        sa.Column("kind", sa.String(length=24), server_default="fine_tune", nullable=False),
    )
    op.add_column("jobs", sa.Column("parent_model", sa.String(length=256), nullable=True))
    op.add_column("jobs", sa.Column("request", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "request")
    op.drop_column("jobs", "parent_model")
    op.drop_column("jobs", "kind")
