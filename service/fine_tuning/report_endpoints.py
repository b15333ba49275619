"""HTTP of reports: one path, six forms; and the part of it that is about privacy."""

from typing import Annotated, Any

from fastapi import APIRouter, Header, Response

from service.fine_tuning import reports, service
from service.fine_tuning.guarantee import guarantee
from service.kit.gateway import Gateway, GatewayDep
from service.organizations.authentication import CallerDep
from service.organizations.service import Caller

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["fine-tuning"])

# A page of the report is complete in itself: nothing is loaded, nothing runs.
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:",
    "x-content-type-options": "nosniff",
    "vary": "Accept, Authorization",
}


@router.get("/{job_id}/report", response_class=Response)
def report(
    job_id: str,
    gateway: GatewayDep,
    caller: CallerDep,
    accept: Annotated[str | None, Header()] = None,
    reviewed: bool = False,
) -> Response:
    """A job's report in the form that the Accept header asks for."""
    caller.require("jobs.read")
    return _answer(gateway, caller, job_id, reports.form_of_accept(accept), reviewed)


@router.get("/{job_id}/report.{suffix}", response_class=Response)
def report_as(
    job_id: str, suffix: str, gateway: GatewayDep, caller: CallerDep, reviewed: bool = False
) -> Response:
    """A job's report: .json, .md, .html, .xml (JUnit), .sarif or .txt."""
    caller.require("jobs.read")
    return _answer(gateway, caller, job_id, reports.form_of_suffix(suffix), reviewed)


@router.get("/{job_id}/privacy")
def privacy(job_id: str, gateway: GatewayDep, caller: CallerDep) -> dict[str, Any]:
    """What a private job guarantees; an error for a job that was tuned without privacy."""
    caller.require("jobs.read")
    with gateway.reading() as session:
        job = service.find(session, caller.organization_id, job_id)
    return guarantee(reports.full_report(gateway.artifacts, job), job)


def _answer(
    gateway: Gateway, caller: Caller, job_id: str, form: reports.Form, reviewed: bool
) -> Response:
    with gateway.reading() as session:
        job = service.find(session, caller.organization_id, job_id)
    found = reports.render(reports.full_report(gateway.artifacts, job), form, reviewed=reviewed)
    return Response(found.content, media_type=found.media_type, headers=HEADERS)
