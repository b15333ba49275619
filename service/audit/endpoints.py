"""HTTP of the audit log. It can only be read."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from service.audit.repository import AuditRepository
from service.audit.schemas import AuditEntryObject, AuditList
from service.kit.gateway import GatewayDep
from service.kit.pagination import paginate
from service.organizations.authentication import CallerDep
from service.store.models import AuditEntry

router = APIRouter(prefix="/v1/audit", tags=["audit"])


@router.get("")
def index(
    gateway: GatewayDep,
    caller: CallerDep,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    order: Literal["asc", "desc"] = "desc",
    subject: str | None = None,
    action: str | None = None,
) -> AuditList:
    """List what was changed, by whom and why."""
    caller.require("audit.read")
    with gateway.reading() as session:
        entries = AuditRepository(session, caller.organization_id)
        page = paginate(
            session,
            entries.readable(subject, action),
            AuditEntry,
            after=after,
            limit=limit,
            newest_first=order == "desc",
            cursors=entries.readable(),
        )
        data = [AuditEntryObject.of(row) for row in page.data]
    return AuditList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=page.has_more,
    )
