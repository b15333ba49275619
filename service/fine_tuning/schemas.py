"""Wire types of jobs, events and checkpoints, as OpenAI's client expects them."""

from typing import Any, Literal, cast

from pydantic import BaseModel, Field

from service.store.models import Checkpoint, Event, Job

MEASURES = (
    "step",
    "train_loss",
    "train_mean_token_accuracy",
    "valid_loss",
    "valid_mean_token_accuracy",
    "full_valid_loss",
    "full_valid_mean_token_accuracy",
)

Status = Literal[
    "validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled"
]


class JobExtras(BaseModel):
    """What only tunegate tells about a job."""

    stage: str | None
    attempt: int = Field(description="number of the current try, from 1")
    queue_position: int | None = Field(description="jobs before this one; None: not waiting")
    defense: dict[str, Any]
    gate: dict[str, Any]
    data_report: dict[str, Any] | None
    estimate: dict[str, Any] | None
    progress: dict[str, Any] | None = Field(
        description="stage, done and total of the work under way; None: nothing is counted now"
    )


class JobObject(BaseModel):
    """A fine-tuning job. The last six fields are ours."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    error: dict[str, Any] | None
    estimated_finish: int | None
    fine_tuned_model: str | None
    finished_at: int | None
    hyperparameters: dict[str, Any]
    integrations: list[Any] | None
    metadata: dict[str, str] | None
    method: dict[str, Any]
    model: str
    organization_id: str
    result_files: list[str]
    seed: int
    status: Status
    trained_tokens: int | None
    training_file: str
    validation_file: str | None
    user_provided_suffix: str | None
    stage: str | None = Field(description="what the job is doing, finer than its status")
    defense: dict[str, Any] = Field(description="the defense with every default written out")
    gate: dict[str, Any] = Field(description="policy version, and verdict and rules once known")
    report: dict[str, Any] | None = Field(description="what was measured; None until then")
    privacy: dict[str, Any] | None = Field(
        description="privacy as it was asked for; None: tuned without. The guarantee is in report"
    )
    tunegate: JobExtras

    @classmethod
    def of(
        cls, job: Job, *, queue_position: int | None = None, started_at: float | None = None
    ) -> "JobObject":
        gate = gate_object(job)
        return cls(
            id=job.id,
            created_at=job.created_at,
            error=job.error,
            estimated_finish=_estimated_finish(job, started_at),
            fine_tuned_model=job.fine_tuned_model,
            finished_at=job.finished_at,
            hyperparameters=job.hyperparameters,
            integrations=job.integrations,
            metadata=job.labels,
            method={
                "type": job.method["type"],
                job.method["type"]: {"hyperparameters": job.hyperparameters},
            },
            model=job.parent_model or job.model,
            organization_id=job.organization_id,
            result_files=[job.result_file_id] if job.result_file_id else [],
            seed=job.seed,
            status=cast(Status, job.status),
            trained_tokens=job.trained_tokens,
            training_file=job.training_file_id,
            validation_file=job.validation_file_id,
            user_provided_suffix=job.suffix,
            stage=job.stage,
            defense=job.defense,
            gate=gate,
            report=job.report,
            privacy=(job.request or {}).get("privacy"),
            tunegate=JobExtras(
                stage=job.stage,
                attempt=job.attempt,
                queue_position=queue_position,
                defense=job.defense,
                gate=gate,
                data_report=job.data_report,
                estimate=job.estimate,
                progress=job.progress,
            ),
        )


def gate_object(job: Job) -> dict[str, Any]:
    """The gate's verdict and rules from the report; before that the policy's version alone."""
    decided = (job.report or {}).get("gate")
    if isinstance(decided, dict):
        return {"policy_version": job.policy.get("version"), **decided}
    return {"policy_version": job.policy.get("version"), "verdict": None, "rules": []}


def _estimated_finish(job: Job, started_at: float | None) -> int | None:
    seconds = (job.estimate or {}).get("seconds")
    if job.status != "running" or started_at is None or not isinstance(seconds, int | float):
        return None
    return int(started_at + seconds)


class JobList(BaseModel):
    object: Literal["list"] = "list"
    data: list[JobObject]
    has_more: bool


class EventObject(BaseModel):
    """One entry of a job's log."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: str
    data: dict[str, Any] | None

    @classmethod
    def of(cls, row: Event) -> "EventObject":
        return cls(
            id=row.id,
            created_at=row.created_at,
            level=cast(Literal["info", "warn", "error"], row.level),
            message=row.message,
            type=row.type,
            data=row.data,
        )


class EventList(BaseModel):
    object: Literal["list"] = "list"
    data: list[EventObject]
    has_more: bool


class CheckpointObject(BaseModel):
    """A complete checkpoint. It is never servable before the job's model passed its gate."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    step_number: int
    metrics: dict[str, Any]

    @classmethod
    def of(cls, row: Checkpoint) -> "CheckpointObject":
        measured = {**row.metrics, "step": row.step_number}
        return cls(
            id=row.id,
            created_at=row.created_at,
            fine_tuned_model_checkpoint=row.name,
            fine_tuning_job_id=row.job_id,
            step_number=row.step_number,
            metrics={name: measured[name] for name in MEASURES if name in measured},
        )


class CheckpointList(BaseModel):
    object: Literal["list"] = "list"
    data: list[CheckpointObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
