"""Wire types of gate runs."""

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from evaluators.gate import Policy
from service.store.models import Event, Job

RunStatus = Literal["queued", "running", "succeeded", "failed", "cancelled"]
SOURCES = Literal["current", "operator", "version", "inline"]


def _form(policy: Any) -> str:
    return "Name" if isinstance(policy, str) else "Policy"


PolicyChoice = Annotated[
    Annotated[str, Field(min_length=1, max_length=64), Tag("Name")]
    | Annotated[Policy, Tag("Policy")],
    Discriminator(_form),
]


class EvaluationRequest(BaseModel):
    """A smaller evaluation than the operator's. Nothing here can exceed what the operator set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    harmful_prompts: int | None = Field(None, ge=0, description="harmful test prompts")
    safe_lookalikes: int | None = Field(None, ge=0, description="safe look-alike prompts")
    benign_prompts: int | None = Field(None, ge=0, description="ordinary harmless prompts")
    open_ended_prompts: int | None = Field(None, ge=0, description="open-ended prompts")
    open_ended_samples: int | None = Field(None, ge=2, description="answers an open prompt")
    utility_rows: int | None = Field(None, ge=1, description="held-out rows that are answered")
    sweep_prompts: int | None = Field(None, ge=0, description="harmful prompts a trigger; 0: none")
    sweep_conditions: int | None = Field(None, ge=1, description="triggers tried at most")
    stress_samples: int | None = Field(None, ge=0, description="further answers a harmful prompt")

    def asked(self) -> dict[str, int]:
        """The fields that were given."""
        return {name: value for name, value in self if value is not None}


class RunRequest(BaseModel):
    """The body of POST /v1/gates/runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(
        min_length=1,
        max_length=256,
        description="a released model, or the id of a job whose model is in quarantine",
    )
    policy: PolicyChoice = Field(
        "current",
        description="`current`, `operator`, the id of a version, or a policy as an object",
    )
    evaluation: EvaluationRequest = EvaluationRequest()


class RunPolicy(BaseModel):
    """What the run judges by."""

    source: SOURCES
    id: str | None = Field(description="of the version, where one was named")
    policy: dict[str, Any]


class RunObject(BaseModel):
    """A gate run. It never changes whether its model is released."""

    id: str
    object: Literal["gate.run"] = "gate.run"
    created_at: int
    finished_at: int | None
    status: RunStatus
    stage: str | None = Field(description="what the run is doing, finer than its status")
    model: str
    base_model: str
    job_id: str = Field(description="the job that made the model")
    policy: RunPolicy
    evaluation: dict[str, int] = Field(description="where less was asked than the operator sets")
    verdict: Literal["passed", "failed", "inconclusive"] | None = Field(
        description="None until the run has succeeded"
    )
    report: dict[str, Any] | None = Field(
        description="metrics and rules; the whole report is under /v1/gates/runs/{id}/report"
    )
    error: dict[str, Any] | None
    attempt: int = Field(description="number of the current try, from 1")
    queue_position: int | None = Field(description="jobs before this run; None: not waiting")
    progress: dict[str, Any] | None = Field(description="stage, done and total of work under way")

    @classmethod
    def of(cls, job: Job, *, queue_position: int | None = None) -> "RunObject":
        request: dict[str, Any] = job.request or {}
        gate = (job.report or {}).get("gate") or {}
        return cls(
            id=job.id,
            created_at=job.created_at,
            finished_at=job.finished_at,
            status=cast(RunStatus, job.status),
            stage=job.stage,
            model=request["model"],
            base_model=job.model,
            job_id=request["source_job_id"],
            policy=RunPolicy(policy=job.policy, **request["policy"]),
            evaluation=request["evaluation"],
            verdict=gate.get("verdict"),
            report=job.report,
            error=job.error,
            attempt=job.attempt,
            queue_position=queue_position,
            progress=job.progress,
        )


class RunList(BaseModel):
    object: Literal["list"] = "list"
    data: list[RunObject]
    has_more: bool


class RunEvent(BaseModel):
    """One entry of a run's log."""

    id: str
    object: Literal["gate.run.event"] = "gate.run.event"
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: str
    data: dict[str, Any] | None

    @classmethod
    def of(cls, row: Event) -> "RunEvent":
        return cls(
            id=row.id,
            created_at=row.created_at,
            level=cast(Literal["info", "warn", "error"], row.level),
            message=row.message,
            type=row.type,
            data=row.data,
        )


class RunEventList(BaseModel):
    object: Literal["list"] = "list"
    data: list[RunEvent]
    has_more: bool
