"""Tables of the gateway. Times are Unix seconds; every tenant row carries its organisation."""

from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Float,
    ForeignKey,
    Index,
    Integer,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from jobspec.formats import FileFormat

SEQUENCE = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    """Declarative base; `dict` columns are JSON."""

    type_annotation_map: ClassVar[dict[Any, Any]] = {dict[str, Any]: JSON, list[Any]: JSON}


class Organization(Base):
    __tablename__ = "organizations"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(128), unique=True)
    created_at: Mapped[int] = mapped_column(BigInteger)


class ApiKey(Base):
    """A key's HMAC; the key itself is shown once and never stored."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    organization_id: Mapped[str] = mapped_column(ForeignKey("organizations.id"), index=True)
    prefix: Mapped[str] = mapped_column(String(32))
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    role: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[int] = mapped_column(BigInteger)
    last_used_at: Mapped[int | None] = mapped_column(BigInteger)
    revoked_at: Mapped[int | None] = mapped_column(BigInteger)


class File(Base):
    """An uploaded or produced file; `location` is a key of the artifact store."""

    __tablename__ = "files"

    sequence: Mapped[int] = mapped_column(SEQUENCE, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    organization_id: Mapped[str] = mapped_column(ForeignKey("organizations.id"), index=True)
    filename: Mapped[str] = mapped_column(String(512))
    purpose: Mapped[str] = mapped_column(String(32))
    bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
    status: Mapped[str] = mapped_column(String(16))
    status_details: Mapped[str | None] = mapped_column(Text)
    format: Mapped[FileFormat | None] = mapped_column(String(16))
    rows: Mapped[int | None] = mapped_column(Integer)
    findings: Mapped[list[Any] | None] = mapped_column(JSON)
    location: Mapped[str] = mapped_column(String(512))
    created_at: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[int | None] = mapped_column(BigInteger)
    deleted_at: Mapped[int | None] = mapped_column(BigInteger)


class Job(Base):
    """Work that goes through the queue; most often a fine-tuning job.

    `status` is OpenAI's, `stage` ours; lifecycle.py owns both. `kind` says what is done (kinds.py)
    and `request` what another kind than fine-tuning was asked for; of a fine-tuning job it holds
    `privacy`, where it asks for that. `model` is the base model.
    """

    __tablename__ = "jobs"
    __table_args__ = (
        Index("ix_jobs_organization_sequence", "organization_id", "sequence"),
        Index("ix_jobs_api_key_created", "api_key_id", "created_at"),
    )

    sequence: Mapped[int] = mapped_column(SEQUENCE, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    kind: Mapped[str] = mapped_column(String(24), default="fine_tune", server_default="fine_tune")
    organization_id: Mapped[str] = mapped_column(ForeignKey("organizations.id"))
    status: Mapped[str] = mapped_column(String(24), index=True)
    stage: Mapped[str | None] = mapped_column(String(24))
    model: Mapped[str] = mapped_column(String(256))
    parent_model: Mapped[str | None] = mapped_column(String(256))
    request: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    training_file_id: Mapped[str] = mapped_column(String(64), index=True)
    validation_file_id: Mapped[str | None] = mapped_column(String(64), index=True)
    suffix: Mapped[str | None] = mapped_column(String(64))
    seed: Mapped[int] = mapped_column(BigInteger)
    method: Mapped[dict[str, Any]] = mapped_column(JSON)
    hyperparameters: Mapped[dict[str, Any]] = mapped_column(JSON)
    integrations: Mapped[list[Any] | None] = mapped_column(JSON)
    labels: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    defense: Mapped[dict[str, Any]] = mapped_column(JSON)
    gate_request: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    policy: Mapped[dict[str, Any]] = mapped_column(JSON)
    data_report: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    estimate: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    progress: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    report: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    error: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    trained_tokens: Mapped[int | None] = mapped_column(BigInteger)
    fine_tuned_model: Mapped[str | None] = mapped_column(String(256))
    result_file_id: Mapped[str | None] = mapped_column(String(64))
    artifact: Mapped[str | None] = mapped_column(String(512))
    attempt: Mapped[int] = mapped_column(Integer)
    failures: Mapped[int] = mapped_column(Integer, default=0)
    cancel_requested: Mapped[bool] = mapped_column(default=False)
    pause_requested: Mapped[bool] = mapped_column(default=False)
    request_digest: Mapped[str | None] = mapped_column(String(64))
    idempotency_key: Mapped[str | None] = mapped_column(String(255))
    api_key_id: Mapped[str | None] = mapped_column(String(64))
    created_at: Mapped[int] = mapped_column(BigInteger)
    finished_at: Mapped[int | None] = mapped_column(BigInteger)


class JobLabel(Base):
    """One metadata pair of a job, so that the list can be filtered by it."""

    __tablename__ = "job_labels"
    __table_args__ = (Index("ix_job_labels_key_value", "key", "value"),)

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str] = mapped_column(String(512))


class Attempt(Base):
    """One try at a job: who holds it, until when, and how it ended.

    state: queued -> claimed -> finished | lost | released. (job_id, number) is the fencing token.
    """

    __tablename__ = "attempts"
    __table_args__ = (UniqueConstraint("job_id", "number"), Index("ix_attempts_state", "state"))

    id: Mapped[int] = mapped_column(SEQUENCE, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    number: Mapped[int] = mapped_column(Integer)
    state: Mapped[str] = mapped_column(String(16))
    available_at: Mapped[float] = mapped_column(Float)
    worker: Mapped[str | None] = mapped_column(String(128))
    lease_expires_at: Mapped[float | None] = mapped_column(Float)
    heartbeat_at: Mapped[float | None] = mapped_column(Float)
    pid: Mapped[int | None] = mapped_column(Integer)
    pid_started: Mapped[float | None] = mapped_column(Float)
    exit_code: Mapped[int | None] = mapped_column(Integer)
    outcome: Mapped[str | None] = mapped_column(String(32))
    log_tail: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[float] = mapped_column(Float)
    started_at: Mapped[float | None] = mapped_column(Float)
    finished_at: Mapped[float | None] = mapped_column(Float)


class Event(Base):
    """Append-only log of a job; paged by sequence, never by time."""

    __tablename__ = "events"
    __table_args__ = (Index("ix_events_job_sequence", "job_id", "sequence"),)

    sequence: Mapped[int] = mapped_column(SEQUENCE, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    created_at: Mapped[int] = mapped_column(BigInteger)
    level: Mapped[str] = mapped_column(String(8))
    type: Mapped[str] = mapped_column(String(24))
    message: Mapped[str] = mapped_column(Text)
    data: Mapped[dict[str, Any] | None] = mapped_column(JSON)


class Metric(Base):
    """Measurements of one training step; a resumed attempt overwrites the steps it repeats."""

    __tablename__ = "metrics"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True)
    data: Mapped[dict[str, Any]] = mapped_column(JSON)


class Checkpoint(Base):
    __tablename__ = "checkpoints"
    __table_args__ = (UniqueConstraint("job_id", "step_number"),)

    sequence: Mapped[int] = mapped_column(SEQUENCE, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    name: Mapped[str] = mapped_column(String(256), unique=True)
    step_number: Mapped[int] = mapped_column(Integer)
    metrics: Mapped[dict[str, Any]] = mapped_column(JSON)
    location: Mapped[str] = mapped_column(String(512))
    created_at: Mapped[int] = mapped_column(BigInteger)


class ReleasedModel(Base):
    """A model that passed its gate. Quarantined models have no row here."""

    __tablename__ = "models"

    id: Mapped[str] = mapped_column(String(256), primary_key=True)
    organization_id: Mapped[str] = mapped_column(ForeignKey("organizations.id"), index=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    base_model: Mapped[str] = mapped_column(String(256))
    location: Mapped[str] = mapped_column(String(512))
    manifest_sha256: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[int] = mapped_column(BigInteger)
    deleted_at: Mapped[int | None] = mapped_column(BigInteger)


class Outbox(Base):
    """A wake-up that the dispatcher still has to send."""

    __tablename__ = "outbox"

    id: Mapped[int] = mapped_column(SEQUENCE, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(String(64))
    attempt: Mapped[int] = mapped_column(Integer)
    created_at: Mapped[float] = mapped_column(Float)
    sent_at: Mapped[float | None] = mapped_column(Float, index=True)


class GatePolicy(Base):
    """One version of an organisation's gate policy, in force until the next one.

    Rows are never edited. A version without a policy is a withdrawal: the operator's holds again.
    """

    __tablename__ = "gate_policies"
    __table_args__ = (UniqueConstraint("organization_id", "version"),)

    sequence: Mapped[int] = mapped_column(SEQUENCE, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    organization_id: Mapped[str] = mapped_column(ForeignKey("organizations.id"))
    version: Mapped[int] = mapped_column(Integer)
    policy: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    policy_sha256: Mapped[str | None] = mapped_column(String(64))
    description: Mapped[str | None] = mapped_column(Text)
    api_key_id: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[int] = mapped_column(BigInteger)


class GateOverride(Base):
    """A reviewer's disagreement with one sample's judgement, or with a job's verdict.

    `was_flagged` keeps the original. It is pending until a second reviewer approves it.
    """

    __tablename__ = "gate_overrides"

    sequence: Mapped[int] = mapped_column(SEQUENCE, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    organization_id: Mapped[str] = mapped_column(ForeignKey("organizations.id"))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    sample: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    flagged: Mapped[bool | None] = mapped_column()
    was_flagged: Mapped[bool | None] = mapped_column()
    verdict: Mapped[str | None] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text)
    api_key_id: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[int] = mapped_column(BigInteger)
    approved_by: Mapped[str | None] = mapped_column(String(64))
    approval_reason: Mapped[str | None] = mapped_column(Text)
    approved_at: Mapped[int | None] = mapped_column(BigInteger)


class AuditEntry(Base):
    """Who did what and why. Append-only (triggers refuse the rest), hash-chained by organisation:
    `number` counts from 1, `hash` covers the entry and `previous_hash`."""

    __tablename__ = "audit_entries"
    __table_args__ = (UniqueConstraint("organization_id", "number"),)

    sequence: Mapped[int] = mapped_column(SEQUENCE, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    organization_id: Mapped[str] = mapped_column(ForeignKey("organizations.id"))
    number: Mapped[int] = mapped_column(Integer)
    created_at: Mapped[int] = mapped_column(BigInteger)
    api_key_id: Mapped[str] = mapped_column(String(64))
    role: Mapped[str] = mapped_column(String(16))
    action: Mapped[str] = mapped_column(String(32))
    subject: Mapped[str] = mapped_column(String(256), index=True)
    reason: Mapped[str | None] = mapped_column(Text)
    data: Mapped[dict[str, Any]] = mapped_column(JSON)
    previous_hash: Mapped[str] = mapped_column(String(64))
    hash: Mapped[str] = mapped_column(String(64))
