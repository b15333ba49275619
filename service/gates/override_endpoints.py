"""HTTP of overrides and of the answers that reviewers look at."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from service.gates import overrides
from service.gates.override_schemas import (
    ApprovalRequest,
    OverrideAnswer,
    OverrideList,
    OverrideRequest,
    SampleList,
    SampleObject,
)
from service.kit.bodies import parse_body, read_body
from service.kit.gateway import GatewayDep
from service.organizations.authentication import CallerDep

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["gates"])


def _body(model: type[BaseModel], *, required: bool) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": required, "content": content}}


@router.post("/{job_id}/overrides", openapi_extra=_body(OverrideRequest, required=True))
async def create(
    job_id: str, request: Request, gateway: GatewayDep, caller: CallerDep
) -> OverrideAnswer:
    """Overrule the judgement of one sample, or the verdict."""
    caller.require("gates.override")
    asked = parse_body(OverrideRequest, await read_body(request))
    return await run_in_threadpool(overrides.add, gateway, caller, job_id, asked)


@router.get("/{job_id}/overrides")
def index(job_id: str, gateway: GatewayDep, caller: CallerDep) -> OverrideList:
    """List the overrides of a job, oldest first."""
    caller.require("jobs.read")
    return OverrideList(data=overrides.overrides_of(gateway, caller, job_id))


@router.post(
    "/{job_id}/overrides/{override_id}/approve",
    openapi_extra=_body(ApprovalRequest, required=False),
)
async def approve(
    job_id: str, override_id: str, request: Request, gateway: GatewayDep, caller: CallerDep
) -> OverrideAnswer:
    """Approve somebody else's override; the model is released where this was what it lacked."""
    caller.require("gates.override")
    asked = parse_body(ApprovalRequest, await read_body(request) or b"{}")
    return await run_in_threadpool(
        overrides.approve, gateway, caller, job_id, override_id, asked.reason
    )


@router.get("/{job_id}/samples")
def samples(
    job_id: str,
    gateway: GatewayDep,
    caller: CallerDep,
    model: Literal["tuned", "base"] | None = None,
    flagged: bool | None = None,
    start: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> SampleList:
    """The stored answers to harmful prompts, as the judge saw them."""
    caller.require("samples.read")
    found = [
        stored
        for stored in overrides.samples_of(gateway, caller, job_id)
        if model in (None, stored.model) and flagged in (None, stored.flagged)
    ]
    page = found[start : start + limit]
    more = start + limit < len(found)
    return SampleList(
        data=[SampleObject.of(stored) for stored in page],
        next=start + limit if more else None,
    )
