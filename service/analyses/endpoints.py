"""HTTP of analyses."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from analyses.run import RESULT
from service.analyses import kinds, service
from service.analyses.schemas import (
    AnalysisEvent,
    AnalysisEventList,
    AnalysisList,
    AnalysisObject,
    AnalysisRequest,
    KindList,
    KindObject,
    ResultFiles,
)
from service.files.service import content
from service.fine_tuning.kinds import ANALYSIS
from service.fine_tuning.report_endpoints import HEADERS
from service.fine_tuning.repository import JobRepository
from service.kit.bodies import parse_body, read_body
from service.kit.gateway import Gateway, GatewayDep
from service.kit.pagination import paginate
from service.organizations.authentication import CallerDep
from service.organizations.service import Caller
from service.store.models import Event, Job

router = APIRouter(prefix="/v1/analyses", tags=["analyses"])

ANALYSIS_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": f"#/components/schemas/{AnalysisRequest.__name__}"}
            }
        },
    }
}

Limit = Annotated[int, Query(ge=1, le=100)]


@router.post("", openapi_extra=ANALYSIS_BODY)
async def create(request: Request, gateway: GatewayDep, caller: CallerDep) -> AnalysisObject:
    """Ask a question about a job or its data; a worker answers it."""
    caller.require("analyses.write")
    body = await read_body(request)
    asked = parse_body(AnalysisRequest, body)

    def write() -> AnalysisObject:
        with gateway.writing() as session:
            job = service.create(session, gateway, caller, asked, body, request.headers)
            return service.describe(session, [job])[0]

    return await run_in_threadpool(write)


@router.get("")
def index(
    gateway: GatewayDep, caller: CallerDep, after: str | None = None, limit: Limit = 20
) -> AnalysisList:
    """List analyses, newest first."""
    caller.require("analyses.read")
    with gateway.reading() as session:
        found = JobRepository(session, caller.organization_id, ANALYSIS)
        page = paginate(session, found.readable(), Job, after=after, limit=limit)
        return AnalysisList(data=service.describe(session, page.data), has_more=page.has_more)


@router.get("/kinds")
def list_kinds(caller: CallerDep) -> KindList:
    """List the kinds of analysis with their schemas, examples, papers and costs."""
    caller.require("analyses.read")
    return KindList(data=kinds.offered())


@router.get("/kinds/{kind}")
def show_kind(kind: str, caller: CallerDep) -> KindObject:
    """Show one kind of analysis."""
    caller.require("analyses.read")
    return KindObject.model_validate(kinds.known(kind, "kind", 404).describe())


@router.get("/{analysis_id}")
def retrieve(analysis_id: str, gateway: GatewayDep, caller: CallerDep) -> AnalysisObject:
    """Show one analysis."""
    caller.require("analyses.read")
    with gateway.reading() as session:
        job = service.find(session, caller.organization_id, analysis_id)
        return service.describe(session, [job])[0]


@router.post("/{analysis_id}/cancel")
def cancel(analysis_id: str, gateway: GatewayDep, caller: CallerDep) -> AnalysisObject:
    """Cancel an analysis."""
    caller.require("analyses.write")
    with gateway.writing() as session:
        job = service.cancel(session, caller.organization_id, analysis_id)
        return service.describe(session, [job])[0]


@router.get("/{analysis_id}/events")
def events(
    analysis_id: str,
    gateway: GatewayDep,
    caller: CallerDep,
    after: str | None = None,
    limit: Limit = 20,
) -> AnalysisEventList:
    """A page of an analysis's events, newest first."""
    caller.require("analyses.read")
    with gateway.reading() as session:
        service.find(session, caller.organization_id, analysis_id)
        page = paginate(
            session,
            JobRepository(session, caller.organization_id, ANALYSIS).events(analysis_id),
            Event,
            after=after,
            limit=limit,
        )
        data = [AnalysisEvent.of(row) for row in page.data]
        return AnalysisEventList(data=data, has_more=page.has_more)


@router.get("/{analysis_id}/files")
def files(analysis_id: str, gateway: GatewayDep, caller: CallerDep) -> ResultFiles:
    """List the files of a result: result.json, index.html and tables."""
    caller.require("analyses.read")
    with gateway.reading() as session:
        job = service.find(session, caller.organization_id, analysis_id)
    return ResultFiles(data=service.result_files(gateway.artifacts, job))


@router.get("/{analysis_id}/result", response_class=StreamingResponse)
def result(analysis_id: str, gateway: GatewayDep, caller: CallerDep) -> StreamingResponse:
    """The whole result of an analysis, as JSON."""
    caller.require("analyses.read")
    return _answer(gateway, caller, analysis_id, RESULT)


@router.get("/{analysis_id}/result/{name}", response_class=StreamingResponse)
def result_file(
    analysis_id: str, name: str, gateway: GatewayDep, caller: CallerDep
) -> StreamingResponse:
    """One file of a result: result.json, index.html, or a table as Parquet."""
    caller.require("analyses.read")
    return _answer(gateway, caller, analysis_id, name)


def _answer(gateway: Gateway, caller: Caller, analysis_id: str, name: str) -> StreamingResponse:
    with gateway.reading() as session:
        job = service.find(session, caller.organization_id, analysis_id)
    stored = service.result_file(gateway.artifacts, job, name)
    found = content(
        gateway.artifacts,
        key=stored.key,
        name=name,
        size=stored.file.bytes,
        sha256=stored.file.sha256,
    )
    headers = {**found.headers, **HEADERS}
    if stored.media_type != service.PARQUET:
        # A page is to be looked at, and its policy lets nothing run.
        headers.pop("content-disposition")
    return StreamingResponse(found.chunks, media_type=stored.media_type, headers=headers)
