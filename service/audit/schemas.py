"""Wire types of the audit log."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from service.store.models import AuditEntry


class AuditEntryObject(BaseModel):
    """One deed. Everything but `object`, `previous_hash` and `hash` is part of the hash."""

    id: str
    object: Literal["audit.entry"] = "audit.entry"
    organization_id: str
    number: int = Field(description="place in the organisation's chain, from 1")
    created_at: int
    api_key_id: str = Field(description="who")
    role: str
    action: str
    subject: str = Field(description="id of what was changed")
    reason: str | None
    data: dict[str, Any]
    previous_hash: str
    hash: str

    @classmethod
    def of(cls, row: AuditEntry) -> "AuditEntryObject":
        return cls(
            id=row.id,
            organization_id=row.organization_id,
            number=row.number,
            created_at=row.created_at,
            api_key_id=row.api_key_id,
            role=row.role,
            action=row.action,
            subject=row.subject,
            reason=row.reason,
            data=row.data,
            previous_hash=row.previous_hash,
            hash=row.hash,
        )


class AuditList(BaseModel):
    object: Literal["list"] = "list"
    data: list[AuditEntryObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
