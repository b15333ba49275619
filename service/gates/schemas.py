"""Wire types of gate policies."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from evaluators.gate import Policy, policy_sha256
from service.store.models import GatePolicy

OPERATOR = "operator"
CURRENT = "current"


class PolicyRequest(BaseModel):
    """The body of POST /v1/gates/policies."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: Any = Field(
        description="the policy as an object, or as YAML text",
        json_schema_extra={"type": ["object", "string"]},
    )
    description: str | None = Field(
        None, max_length=2000, description="why it was set, for the list and the audit log"
    )

    @field_validator("policy")
    @classmethod
    def _object_or_text(cls, policy: Any) -> Any:
        if not isinstance(policy, dict | str):
            raise ValueError("expected an object, or YAML text")
        return policy


class PolicyObject(BaseModel):
    """One version of a policy. The operator's own has the id `operator` and no version."""

    id: str
    object: Literal["gate.policy"] = "gate.policy"
    source: Literal["organization", "operator"]
    version: int | None
    policy: dict[str, Any] | None = Field(
        description="None: a withdrawal, from which on the operator's policy holds"
    )
    policy_sha256: str | None
    description: str | None
    created_at: int | None
    api_key_id: str | None = Field(description="the key that set it")
    in_force: bool = Field(description="whether jobs created now are judged by it")
    below_floor: list[str] = Field(
        description="demands of the operator that it lacks by now; they are added to every job"
    )

    @classmethod
    def of(cls, row: GatePolicy, *, in_force: bool, below_floor: list[str]) -> "PolicyObject":
        return cls(
            id=row.id,
            source="organization",
            version=row.version,
            policy=row.policy,
            policy_sha256=row.policy_sha256,
            description=row.description,
            created_at=row.created_at,
            api_key_id=row.api_key_id,
            in_force=in_force,
            below_floor=below_floor,
        )

    @classmethod
    def operators(cls, policy: Policy, *, in_force: bool) -> "PolicyObject":
        return cls(
            id=OPERATOR,
            source="operator",
            version=None,
            policy=policy.model_dump(mode="json"),
            policy_sha256=policy_sha256(policy),
            description=policy.description,
            created_at=None,
            api_key_id=None,
            in_force=in_force,
            below_floor=[],
        )


class PolicyList(BaseModel):
    object: Literal["list"] = "list"
    data: list[PolicyObject]
    has_more: bool
