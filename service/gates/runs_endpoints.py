"""HTTP of gate runs."""

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from service.fine_tuning import reports
from service.fine_tuning.kinds import GATE_RUN
from service.fine_tuning.report_endpoints import HEADERS
from service.fine_tuning.repository import JobRepository
from service.gates import runs_service as service
from service.gates.runs_schemas import (
    RunEvent,
    RunEventList,
    RunList,
    RunObject,
    RunRequest,
)
from service.kit.bodies import parse_body, read_body
from service.kit.gateway import Gateway, GatewayDep
from service.kit.pagination import paginate
from service.organizations.authentication import CallerDep
from service.organizations.service import Caller
from service.store.models import Event, Job

router = APIRouter(prefix="/v1/gates/runs", tags=["gates"])

RUN_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": f"#/components/schemas/{RunRequest.__name__}"}}
        },
    }
}

Limit = Annotated[int, Query(ge=1, le=100)]


@router.post("", openapi_extra=RUN_BODY)
async def create(request: Request, gateway: GatewayDep, caller: CallerDep) -> RunObject:
    """Measure and judge a released or quarantined model again. The release stays as it is."""
    caller.require("gates.run")
    body = await read_body(request)
    asked = parse_body(RunRequest, body)

    def write() -> RunObject:
        with gateway.writing() as session:
            run = service.create(session, gateway, caller, asked, body, request.headers)
            return service.describe(session, [run])[0]

    return await run_in_threadpool(write)


@router.get("")
def index(
    gateway: GatewayDep, caller: CallerDep, after: str | None = None, limit: Limit = 20
) -> RunList:
    """List gate runs, newest first."""
    caller.require("gates.read")
    with gateway.reading() as session:
        runs = JobRepository(session, caller.organization_id, GATE_RUN)
        page = paginate(session, runs.readable(), Job, after=after, limit=limit)
        return RunList(data=service.describe(session, page.data), has_more=page.has_more)


@router.get("/{run_id}")
def retrieve(run_id: str, gateway: GatewayDep, caller: CallerDep) -> RunObject:
    """Show one gate run."""
    caller.require("gates.read")
    with gateway.reading() as session:
        run = service.find(session, caller.organization_id, run_id)
        return service.describe(session, [run])[0]


@router.post("/{run_id}/cancel")
def cancel(run_id: str, gateway: GatewayDep, caller: CallerDep) -> RunObject:
    """Cancel a gate run."""
    caller.require("gates.run")
    with gateway.writing() as session:
        run = service.cancel(session, caller.organization_id, run_id)
        return service.describe(session, [run])[0]


@router.get("/{run_id}/events")
def events(
    run_id: str,
    gateway: GatewayDep,
    caller: CallerDep,
    after: str | None = None,
    limit: Limit = 20,
) -> RunEventList:
    """A page of a run's events, newest first."""
    caller.require("gates.read")
    with gateway.reading() as session:
        service.find(session, caller.organization_id, run_id)
        page = paginate(
            session,
            JobRepository(session, caller.organization_id, GATE_RUN).events(run_id),
            Event,
            after=after,
            limit=limit,
        )
        return RunEventList(data=[RunEvent.of(row) for row in page.data], has_more=page.has_more)


@router.get("/{run_id}/report", response_class=Response)
def report(
    run_id: str,
    gateway: GatewayDep,
    caller: CallerDep,
    accept: Annotated[str | None, Header()] = None,
) -> Response:
    """The whole report of a finished run, in the form that the Accept header asks for."""
    caller.require("gates.read")
    return _answer(gateway, caller, run_id, reports.form_of_accept(accept))


@router.get("/{run_id}/report.{suffix}", response_class=Response)
def report_as(run_id: str, suffix: str, gateway: GatewayDep, caller: CallerDep) -> Response:
    """A run's report: .json, .md, .html, .xml (JUnit), .sarif or .txt."""
    caller.require("gates.read")
    return _answer(gateway, caller, run_id, reports.form_of_suffix(suffix))


def _answer(gateway: Gateway, caller: Caller, run_id: str, form: reports.Form) -> Response:
    with gateway.reading() as session:
        run = service.find(session, caller.organization_id, run_id)
    found = reports.render(reports.full_report(gateway.artifacts, run), form)
    return Response(found.content, media_type=found.media_type, headers=HEADERS)
