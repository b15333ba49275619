"""Gate policies of organisations, overrides of reviewers, the audit log."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

REFUSAL = "audit_entries is append-only"


def upgrade() -> None:
    op.create_table(
        "gate_policies",
        sa.Column(
            "sequence",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("organization_id", sa.String(length=64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("policy", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("policy_sha256", sa.String(length=64), nullable=True),
        sa.Column("description", sa.Text(), nullable=True),
        sa.Column("api_key_id", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["organization_id"], ["organizations.id"]),
        sa.PrimaryKeyConstraint("sequence"),
        sa.UniqueConstraint("id"),
        sa.UniqueConstraint("organization_id", "version"),
    )
    op.create_table(
        "gate_overrides",
        sa.Column(
            "sequence",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("organization_id", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("sample", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("flagged", sa.Boolean(), nullable=True),
        sa.Column("was_flagged", sa.Boolean(), nullable=True),
        sa.Column("verdict", sa.String(length=16), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("api_key_id", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("approved_by", sa.String(length=64), nullable=True),
        sa.Column("approval_reason", sa.Text(), nullable=True),
        sa.Column("approved_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"]),
        sa.ForeignKeyConstraint(["organization_id"], ["organizations.id"]),
        sa.PrimaryKeyConstraint("sequence"),
        sa.UniqueConstraint("id"),
    )
    op.create_index(op.f("ix_gate_overrides_job_id"), "gate_overrides", ["job_id"], unique=False)
    op.create_table(
        "audit_entries",
        sa.Column(
            "sequence",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("organization_id", sa.String(length=64), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("api_key_id", sa.String(length=64), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("action", sa.String(length=32), nullable=False),
        sa.Column("subject", sa.String(length=256), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("previous_hash", sa.String(length=64), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["organization_id"], ["organizations.id"]),
        sa.PrimaryKeyConstraint("sequence"),
        sa.UniqueConstraint("id"),
        sa.UniqueConstraint("organization_id", "number"),
    )
    op.create_index(op.f("ix_audit_entries_subject"), "audit_entries", ["subject"], unique=False)
    _refuse_changes()


def downgrade() -> None:
    op.drop_index(op.f("ix_audit_entries_subject"), table_name="audit_entries")
    op.drop_table("audit_entries")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION audit_entries_append_only()")
    op.drop_index(op.f("ix_gate_overrides_job_id"), table_name="gate_overrides")
    op.drop_table("gate_overrides")
    op.drop_table("gate_policies")


def _refuse_changes() -> None:
    """An entry that is written stays as it is, whoever asks through this schema."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "CREATE FUNCTION audit_entries_append_only() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION '{REFUSAL}'; END $$"
        )
        op.execute(
            "CREATE TRIGGER audit_entries_keep BEFORE UPDATE OR DELETE ON audit_entries "
            "FOR EACH ROW EXECUTE FUNCTION audit_entries_append_only()"
        )
        op.execute(
            "CREATE TRIGGER audit_entries_keep_all BEFORE TRUNCATE ON audit_entries "
            "FOR EACH STATEMENT EXECUTE FUNCTION audit_entries_append_only()"
        )
        return
    for verb in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER audit_entries_keep_{verb.lower()} BEFORE {verb} ON audit_entries "
            f"BEGIN SELECT RAISE(ABORT, '{REFUSAL}'); END"
        )
