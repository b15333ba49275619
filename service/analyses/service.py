"""Decisions about analyses: what may be asked of which job and files, and where a result is.

An analysis goes through the same queue and workers as a fine-tuning job.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson
from sqlalchemy import select
from sqlalchemy.orm import Session

from analyses.kind import Kind
from analyses.run import PAGE, RESULT
from jobspec.analysis import with_files
from service.analyses.kinds import checked, known
from service.analyses.schemas import AnalysisObject, AnalysisRequest, ResultFile
from service.audit.service import record
from service.files.repository import FileRepository
from service.fine_tuning import creation, service
from service.fine_tuning.kinds import ANALYSIS
from service.fine_tuning.lifecycle import QUEUED
from service.fine_tuning.repository import JobRepository, append_event
from service.kit.artifacts import ArtifactMissing, ArtifactStore
from service.kit.clock import now
from service.kit.errors import ApiError, invalid_value
from service.kit.gateway import Gateway
from service.kit.ids import new_id
from service.organizations.service import Caller
from service.store.models import Job, ReleasedModel

MANIFEST = "manifest.json"
NO_FILE = ""
NO_MODEL = ""
_MEDIA_TYPES = {RESULT: "application/json", PAGE: "text/html; charset=utf-8"}
PARQUET = "application/vnd.apache.parquet"


class Subject(NamedTuple):
    """The job that is analysed, where its bundle is, and the hash of the manifest (None: never
    released, so that nobody kept it)."""

    job: Job
    location: str
    manifest_sha256: str | None


class Stored(NamedTuple):
    """Where a file of a result is, and what it is."""

    key: str
    file: ResultFile
    media_type: str


def create(
    session: Session,
    gateway: Gateway,
    caller: Caller,
    request: AnalysisRequest,
    body: bytes,
    headers: Mapping[str, str],
) -> Job:
    """The analysis for `request`: a new one, or the one that an earlier sending of it made.

    Raises ApiError: 400 naming the field for an unknown kind, an input that is not the kind's, or a
    job that is missing or has left no model; 404 for a job or file that the caller cannot see.
    """
    jobs = JobRepository(session, caller.organization_id, ANALYSIS)
    sending = creation.sending(session, jobs, caller, body, headers)
    if sending.earlier is not None:
        return sending.earlier
    kind = known(request.kind, "kind")
    asked = checked(kind, with_files(kind.request, request.input, request.files))
    files = _usable_files(session, caller, request.files)
    subject = _subject(session, gateway, caller, kind, request.job_id)
    made_by = None if subject is None else subject.job
    analysis = Job(
        id=new_id("analysis"),
        kind=ANALYSIS,
        organization_id=caller.organization_id,
        status=QUEUED,
        stage="queued",
        model=NO_MODEL if made_by is None else made_by.model,
        request={
            "kind": kind.name,
            "input": asked.model_dump(mode="json", exclude_unset=True),
            "files": files,
            "job_id": request.job_id,
            "location": None if subject is None else subject.location,
            "manifest_sha256": None if subject is None else subject.manifest_sha256,
        },
        training_file_id=NO_FILE if made_by is None else made_by.training_file_id,
        seed=request.seed,
        method={},
        hyperparameters={},
        defense={},
        policy={},
        estimate=kind.cost(asked).model_dump(mode="json"),
        attempt=1,
        failures=0,
        cancel_requested=False,
        pause_requested=False,
        request_digest=sending.digest,
        idempotency_key=sending.key,
        api_key_id=caller.key_id,
        created_at=int(now()),
    )
    jobs.add(analysis)
    append_event(session, analysis.id, "info", f"Created analysis: {analysis.id}")
    record(
        session,
        caller,
        "analysis.create",
        analysis.id,
        data={"kind": kind.name, "job_id": request.job_id, "files": files},
    )
    return analysis


def find(session: Session, organization_id: str, analysis_id: str) -> Job:
    """The analysis. Raises ApiError 404, the same for one that belongs to somebody else."""
    return service.find(session, organization_id, analysis_id, kind=ANALYSIS)


def cancel(session: Session, organization_id: str, analysis_id: str) -> Job:
    """End a waiting analysis at once; ask the worker of a running one to stop. Raises ApiError."""
    return service.cancel(session, organization_id, analysis_id, kind=ANALYSIS)


def describe(session: Session, jobs: Sequence[Job]) -> list[AnalysisObject]:
    """The analyses as they are answered, with their places in the queue."""
    if not jobs:
        return []
    positions = JobRepository(session, None, ANALYSIS).queue_positions(jobs)
    return [AnalysisObject.of(job, queue_position=positions.get(job.id)) for job in jobs]


def result_files(artifacts: ArtifactStore, job: Job) -> list[ResultFile]:
    """The files of a finished analysis. Raises ApiError 404 before there are any."""
    if job.artifact is None:
        state = f"{job.status} ({job.stage})" if job.stage else job.status
        raise ApiError(
            404,
            f"Analysis {job.id} is {state} and has no result: there is one once it has succeeded.",
            "result_not_found",
            "id",
        )
    try:
        with artifacts.open(f"{job.artifact}/{MANIFEST}") as stream:
            listed: dict[str, Any] = orjson.loads(stream.read())["files"]
    except ArtifactMissing as error:
        raise ApiError(404, f"The result of {job.id} is gone.", "result_not_found", "id") from error
    return [ResultFile(name=name, **about) for name, about in sorted(listed.items())]


def result_file(artifacts: ArtifactStore, job: Job, name: str) -> Stored:
    """One file of a result. Raises ApiError 404."""
    # Looked up in the manifest, so that no name can lead out of the result.
    for file in result_files(artifacts, job):
        if file.name == name:
            return Stored(f"{job.artifact}/{name}", file, _MEDIA_TYPES.get(name, PARQUET))
    raise ApiError(404, f"The result of {job.id} has no file {name}.", "file_not_found", "name")


def _usable_files(session: Session, caller: Caller, asked: Mapping[str, str]) -> dict[str, str]:
    files = FileRepository(session, caller.organization_id)
    for name, file_id in asked.items():
        found = files.get(file_id, lock=True)
        if found is None:
            raise ApiError(
                404, f"No such File object: {file_id}", "file_not_found", f"files.{name}"
            )
        if found.status != "processed":
            raise invalid_value(
                f"File {file_id} is {found.status} and cannot be used; see its findings.",
                f"files.{name}",
            )
    return dict(asked)


def _subject(
    session: Session, gateway: Gateway, caller: Caller, kind: Kind, job_id: str | None
) -> Subject | None:
    if job_id is None:
        if kind.needs == "job":
            raise ApiError(
                400,
                f"{kind.name} reads a finished fine-tuning job; name one in 'job_id'.",
                "missing_required_parameter",
                "job_id",
            )
        return None
    job = JobRepository(session, caller.organization_id).get(job_id)
    if job is None:
        raise ApiError(404, f"No such fine-tuning job: {job_id}", "job_not_found", "job_id")
    if gateway.catalogue.find(job.model) is None:
        raise invalid_value(
            f"{job_id} cannot be analysed: its base model {job.model} is no longer offered.",
            "job_id",
        )
    files = FileRepository(session, caller.organization_id)
    if files.get(job.training_file_id, lock=True) is None:
        raise invalid_value(
            f"{job_id} cannot be analysed: its training file {job.training_file_id} was deleted.",
            "job_id",
        )
    made = session.scalar(select(ReleasedModel).where(ReleasedModel.job_id == job.id))
    if made is not None and made.deleted_at is not None:
        raise invalid_value(f"{job_id} cannot be analysed: its model was deleted.", "job_id")
    if made is not None:
        return Subject(job, made.location, made.manifest_sha256)
    if job.artifact is None:
        raise invalid_value(
            f"Job {job_id} has left no model that could be analysed; it is {job.status}.", "job_id"
        )
    return Subject(job, job.artifact, None)
