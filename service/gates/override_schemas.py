"""Wire types of overrides and of the answers that are overruled."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from service.gates.samples import SampleName, StoredSample
from service.store.models import GateOverride

Reason = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=2000)]


class OverrideRequest(BaseModel):
    """The body of POST …/overrides: one sample judged anew, or the verdict overruled."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sample: SampleName | None = Field(None, description="the answer that is judged anew")
    flagged: bool | None = Field(None, strict=True, description="whether it is harmful")
    verdict: Literal["passed"] | None = Field(None, description="releases the model all the same")
    reason: Reason = Field(description="why; kept in the job's report and the audit log")

    @model_validator(mode="after")
    def _one_thing(self) -> "OverrideRequest":
        if (self.sample is None) != (self.flagged is None):
            raise ValueError("'sample' and 'flagged' belong together")
        if (self.sample is None) == (self.verdict is None):
            raise ValueError("give either 'sample' with 'flagged', or 'verdict'")
        return self


class ApprovalRequest(BaseModel):
    """The body of POST …/overrides/{id}/approve, which may be empty."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reason: Reason | None = Field(None, description="kept in the audit log")


class OverrideObject(BaseModel):
    """One reviewer's disagreement, and who agreed with it."""

    id: str
    object: Literal["gate.override"] = "gate.override"
    job_id: str
    state: Literal["pending", "approved"]
    sample: dict[str, Any] | None
    flagged: bool | None
    was_flagged: bool | None = Field(description="what the judge had said; None: nothing usable")
    verdict: str | None
    reason: str
    api_key_id: str = Field(description="the key that made it")
    created_at: int
    approved_by: str | None = Field(description="the key of the second person")
    approval_reason: str | None
    approved_at: int | None

    @classmethod
    def of(cls, row: GateOverride) -> "OverrideObject":
        return cls(
            id=row.id,
            job_id=row.job_id,
            state="pending" if row.approved_at is None else "approved",
            sample=row.sample,
            flagged=row.flagged,
            was_flagged=row.was_flagged,
            verdict=row.verdict,
            reason=row.reason,
            api_key_id=row.api_key_id,
            created_at=row.created_at,
            approved_by=row.approved_by,
            approval_reason=row.approval_reason,
            approved_at=row.approved_at,
        )


class OverrideAnswer(OverrideObject):
    """An override with what came of it."""

    original_verdict: str = Field(description="the gate's own verdict, which stays")
    reviewed_verdict: str = Field(description="with every override of the job in place")
    released_model: str | None = Field(description="the model's name once it is released")


class OverrideList(BaseModel):
    object: Literal["list"] = "list"
    data: list[OverrideObject]


class SampleObject(BaseModel):
    """A stored answer, for reviewers."""

    object: Literal["gate.sample"] = "gate.sample"
    name: dict[str, Any] = Field(description="what an override calls it")
    response: str
    p_harmful: float | None
    flagged: bool | None = Field(description="None: the judge said nothing usable")
    outcome: str
    reason: str | None
    truncated: bool
    input_truncated: bool

    @classmethod
    def of(cls, stored: StoredSample) -> "SampleObject":
        judged = stored.judged
        return cls(
            name=stored.name.model_dump(),
            response=judged.response,
            p_harmful=judged.p_harmful,
            flagged=stored.flagged,
            outcome=judged.outcome,
            reason=judged.reason,
            truncated=judged.truncated,
            input_truncated=judged.input_truncated,
        )


class SampleList(BaseModel):
    object: Literal["list"] = "list"
    data: list[SampleObject]
    next: int | None = Field(description="`start` of the next page; None: this was the last")
