"""HTTP of fine-tuning jobs."""

import re
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from service.fine_tuning import creation, events_stream, service
from service.fine_tuning.repository import JobRepository
from service.fine_tuning.requests import JobRequest
from service.fine_tuning.schemas import (
    CheckpointList,
    CheckpointObject,
    EventList,
    EventObject,
    JobList,
    JobObject,
)
from service.kit.bodies import parse_body, read_body
from service.kit.errors import invalid_value
from service.kit.gateway import GatewayDep
from service.kit.pagination import paginate
from service.organizations.authentication import CallerDep
from service.store.models import Checkpoint, Event, Job

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["fine-tuning"])

JOB_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": f"#/components/schemas/{JobRequest.__name__}"}}
        },
    }
}
_METADATA = re.compile(r"metadata\[(.*)\]", re.DOTALL)

Limit = Annotated[int, Query(ge=1, le=100)]


@router.post("", openapi_extra=JOB_BODY)
async def create(request: Request, gateway: GatewayDep, caller: CallerDep) -> JobObject:
    """Create a job."""
    caller.require("jobs.write")
    body = await read_body(request)
    asked = parse_body(JobRequest, body)

    def write() -> JobObject:
        with gateway.writing() as session:
            job = creation.create(session, gateway, caller, asked, body, request.headers)
            return service.describe(session, [job])[0]

    return await run_in_threadpool(write)


@router.get("")
def index(
    request: Request,
    gateway: GatewayDep,
    caller: CallerDep,
    after: str | None = None,
    limit: Limit = 20,
) -> JobList:
    """List jobs, newest first. `metadata[key]=value` filters; `metadata=null`: those without."""
    caller.require("jobs.read")
    labels, unlabelled = _metadata_filter(request)
    with gateway.reading() as session:
        jobs = JobRepository(session, caller.organization_id)
        page = paginate(
            session,
            jobs.filtered(labels, unlabelled=unlabelled),
            Job,
            after=after,
            limit=limit,
            cursors=jobs.readable(),
        )
        return JobList(data=service.describe(session, page.data), has_more=page.has_more)


def _metadata_filter(request: Request) -> tuple[dict[str, str], bool]:
    labels: dict[str, str] = {}
    unlabelled = False
    for name, value in request.query_params.multi_items():
        if name == "metadata":
            if value != "null":
                raise invalid_value("Use metadata[key]=value, or metadata=null.", "metadata")
            unlabelled = True
        elif match := _METADATA.fullmatch(name):
            if labels.get(match[1], value) != value:
                raise invalid_value("One metadata key is asked for with two values.", "metadata")
            labels[match[1]] = value
    if labels and unlabelled:
        raise invalid_value("metadata=null and metadata[key]=value exclude each other.", "metadata")
    return labels, unlabelled


@router.get("/{job_id}")
def retrieve(job_id: str, gateway: GatewayDep, caller: CallerDep) -> JobObject:
    """Show one job."""
    caller.require("jobs.read")
    with gateway.reading() as session:
        job = service.find(session, caller.organization_id, job_id)
        return service.describe(session, [job])[0]


@router.post("/{job_id}/cancel")
def cancel(job_id: str, gateway: GatewayDep, caller: CallerDep) -> JobObject:
    """Cancel a job."""
    caller.require("jobs.write")
    with gateway.writing() as session:
        job = service.cancel(session, caller.organization_id, job_id)
        return service.describe(session, [job])[0]


@router.post("/{job_id}/pause")
def pause(job_id: str, gateway: GatewayDep, caller: CallerDep) -> JobObject:
    """Pause a job."""
    caller.require("jobs.write")
    with gateway.writing() as session:
        job = service.pause(session, caller.organization_id, job_id)
        return service.describe(session, [job])[0]


@router.post("/{job_id}/resume")
def resume(job_id: str, gateway: GatewayDep, caller: CallerDep) -> JobObject:
    """Resume a paused job."""
    caller.require("jobs.write")
    with gateway.writing() as session:
        job = service.resume(session, caller.organization_id, job_id)
        return service.describe(session, [job])[0]


@router.get("/{job_id}/events", response_model=EventList)
def events(
    job_id: str,
    gateway: GatewayDep,
    caller: CallerDep,
    after: str | None = None,
    limit: Limit = 20,
    stream: bool = False,
    last_event_id: Annotated[str | None, Header()] = None,
) -> EventList | StreamingResponse:
    """A page of events, newest first; with `stream=true` all of them as they come, oldest first."""
    caller.require("jobs.read")
    with gateway.reading() as session:
        service.find(session, caller.organization_id, job_id)
        if not stream:
            page = paginate(
                session,
                JobRepository(session, caller.organization_id).events(job_id),
                Event,
                after=after,
                limit=limit,
            )
            return EventList(
                data=[EventObject.of(row) for row in page.data], has_more=page.has_more
            )
    cursor = events_stream.start_of(gateway, job_id, last_event_id or after)
    return StreamingResponse(
        events_stream.stream(gateway, job_id, cursor),
        media_type="text/event-stream",
        headers=events_stream.HEADERS,
    )


@router.get("/{job_id}/checkpoints")
def checkpoints(
    job_id: str,
    gateway: GatewayDep,
    caller: CallerDep,
    after: str | None = None,
    limit: Limit = 10,
) -> CheckpointList:
    """A page of checkpoints, newest first."""
    caller.require("jobs.read")
    with gateway.reading() as session:
        service.find(session, caller.organization_id, job_id)
        page = paginate(
            session,
            JobRepository(session, caller.organization_id).checkpoints(job_id),
            Checkpoint,
            after=after,
            limit=limit,
        )
        data = [CheckpointObject.of(row) for row in page.data]
    return CheckpointList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=page.has_more,
    )
