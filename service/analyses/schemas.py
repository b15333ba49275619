"""Wire types of analyses."""

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from analyses.kind import Cost, Fidelity, Needs
from jobspec.analysis import FILE_NAME, MOST_SEED
from service.store.models import Event, Job

AnalysisStatus = Literal["queued", "running", "succeeded", "failed", "cancelled"]
FileName = Annotated[str, StringConstraints(pattern=FILE_NAME)]
Id = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class AnalysisRequest(BaseModel):
    """The body of POST /v1/analyses."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str = Field(min_length=1, max_length=128, description="name of a kind of analysis")
    input: dict[str, Any] = Field(
        {}, description="what is asked; its schema is under /v1/analyses/kinds/{kind}"
    )
    files: dict[FileName, Id] = Field(
        {},
        max_length=16,
        description="ids of uploaded files by name. A name that is a field of the input becomes "
        "its value where the input leaves it out",
    )
    job_id: Id | None = Field(
        None, description="the finished fine-tuning job that the analysis reads"
    )
    seed: int = Field(0, ge=0, le=MOST_SEED, description="of all randomness in the method")


class KindObject(BaseModel):
    """What there is to know about a kind before asking."""

    object: Literal["analysis.kind"] = "analysis.kind"
    kind: str
    title: str
    question: str
    request_schema: dict[str, Any] = Field(description="JSON schema of `input`")
    result_schema: dict[str, Any] = Field(description="JSON schema of what the kind finds")
    example: dict[str, Any] = Field(description="an input that works as it stands")
    paper: str
    fidelity: Fidelity = Field(
        description="faithful to the paper; derived: proven or measured here; simplified"
    )
    backed_by: list[str] = Field(description="tests that back this up")
    limits: list[str]
    quick: bool = Field(description="answers in under a second")
    needs: Needs = Field(description="what it reads besides its input")
    cost_of_example: Cost


class KindList(BaseModel):
    object: Literal["list"] = "list"
    data: list[KindObject]


class ResultFile(BaseModel):
    """A file of a result, under /v1/analyses/{id}/result/{name}."""

    name: str
    bytes: int
    sha256: str


class AnalysisObject(BaseModel):
    """A question to a method, and what has become of it."""

    id: str
    object: Literal["analysis"] = "analysis"
    created_at: int
    finished_at: int | None
    status: AnalysisStatus
    stage: str | None = Field(description="what the analysis is doing, finer than its status")
    kind: str
    input: dict[str, Any]
    files: dict[str, str]
    job_id: str | None
    seed: int
    cost: Cost | None = Field(description="what it will take, estimated when it was created")
    result: dict[str, Any] | None = Field(
        description="single values, warnings, names of tables; the whole is under "
        "/v1/analyses/{id}/result"
    )
    error: dict[str, Any] | None
    attempt: int = Field(description="number of the current try, from 1")
    queue_position: int | None = Field(description="jobs before this one; None: not waiting")
    progress: dict[str, Any] | None = Field(description="stage, done and total of work under way")

    @classmethod
    def of(cls, job: Job, *, queue_position: int | None = None) -> "AnalysisObject":
        request: dict[str, Any] = job.request or {}
        return cls(
            id=job.id,
            created_at=job.created_at,
            finished_at=job.finished_at,
            status=cast(AnalysisStatus, job.status),
            stage=job.stage,
            kind=request["kind"],
            input=request["input"],
            files=request["files"],
            job_id=request["job_id"],
            seed=job.seed,
            cost=None if job.estimate is None else Cost.model_validate(job.estimate),
            result=job.report,
            error=job.error,
            attempt=job.attempt,
            queue_position=queue_position,
            progress=job.progress,
        )


class AnalysisList(BaseModel):
    object: Literal["list"] = "list"
    data: list[AnalysisObject]
    has_more: bool


class ResultFiles(BaseModel):
    object: Literal["list"] = "list"
    data: list[ResultFile]


class AnalysisEvent(BaseModel):
    """One entry of an analysis's log."""

    id: str
    object: Literal["analysis.event"] = "analysis.event"
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: str
    data: dict[str, Any] | None

    @classmethod
    def of(cls, row: Event) -> "AnalysisEvent":
        return cls(
            id=row.id,
            created_at=row.created_at,
            level=cast(Literal["info", "warn", "error"], row.level),
            message=row.message,
            type=row.type,
            data=row.data,
        )


class AnalysisEventList(BaseModel):
    object: Literal["list"] = "list"
    data: list[AnalysisEvent]
    has_more: bool
