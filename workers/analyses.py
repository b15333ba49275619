"""Analyses as a worker sees them: a question with its files, and a result that is stored."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from jobspec.analysis import AnalysedJob, AnalysisSpec
from jobspec.catalogue import load_catalogue
from service.fine_tuning.attempts import JobError, Lease
from service.fine_tuning.lifecycle import SUCCEEDED, move
from service.fine_tuning.repository import append_event
from service.kit.artifacts import ArtifactMissing, ArtifactStore
from service.settings import Settings
from service.store.models import File, Job
from workers.bundles import BundleDamaged, read_bundle
from workers.results import ResultPublisher
from workers.workspace import CannotStart, base_entry, fetch_file, job_folder

ROOM = "analyses"
RESULT_FILES = ("result.json", "index.html")


@dataclass(frozen=True)
class AnalysisPlan:
    """What the store says about an attempt. training: of the job that is analysed, if one is."""

    job: Job
    files: Mapping[str, File]
    training: File | None


def opening(job: Job, number: int) -> list[str]:
    """What the log says when an attempt begins."""
    if number == 1:
        return [f"Answering with {(job.request or {}).get('kind')}"]
    return [f"Analysis continues (attempt {number})"]


def read_plan(session: Session, lease: Lease) -> AnalysisPlan:
    """The analysis and its files. Raises CannotStart for a file that is gone."""
    job = session.scalars(select(Job).where(Job.id == lease.job_id)).one()
    request: dict[str, Any] = job.request or {}
    files = {
        name: _file(session, job, file_id, f"files.{name}")
        for name, file_id in request["files"].items()
    }
    training = None
    if request["job_id"] is not None:
        training = _file(session, job, job.training_file_id, "job_id")
    return AnalysisPlan(job, files, training)


def prepare(
    settings: Settings, artifacts: ArtifactStore, lease: Lease, plan: AnalysisPlan
) -> tuple[Path, Path]:
    """Fetch files and bundle and write the spec; returns (spec file, work folder). Raises
    CannotStart, StorageFull."""
    job, request = plan.job, plan.job.request or {}
    folder = job_folder(settings, job.id)
    (folder / "files").mkdir(parents=True, exist_ok=True)
    analysed = None
    if plan.training is not None:
        analysed = AnalysedJob(
            job_id=request["job_id"],
            base=base_entry(load_catalogue(settings.catalogue), job),
            bundle=_fetch_bundle(artifacts, request, folder / "bundle"),
            training_file=fetch_file(
                artifacts, plan.training, folder / "training.jsonl", "training_file"
            ),
        )
    spec = AnalysisSpec(
        analysis_id=job.id,
        kind=request["kind"],
        request=request["input"],
        files={
            name: fetch_file(artifacts, file, folder / "files" / name, "file")
            for name, file in plan.files.items()
        },
        job=analysed,
        seed=job.seed,
        cache_dir=settings.cache_dir,
    )
    path = folder / "spec.json"
    path.write_text(spec.model_dump_json(indent=2), "utf-8")
    return path, folder


class AnalysisPublisher(ResultPublisher):
    """The result, its tables and its page."""

    room = ROOM
    files = RESULT_FILES

    def settle(self, session: Session, job: Job, report: dict[str, Any], key: str) -> str:
        job.report = report
        job.artifact = key
        job.pause_requested = False
        for warning in report.get("warnings") or []:
            append_event(session, job.id, "warn", str(warning))
        append_event(session, job.id, "info", "The analysis has successfully completed")
        move(job, SUCCEEDED)
        return SUCCEEDED


def _file(session: Session, job: Job, file_id: str, param: str) -> File:
    found = session.scalar(
        select(File).where(
            File.id == file_id,
            File.organization_id == job.organization_id,
            File.deleted_at.is_(None),
        )
    )
    if found is None:
        raise CannotStart(
            JobError(
                "invalid_file", f"The file {file_id} is no longer there; upload it again.", param
            )
        )
    return found


def _fetch_bundle(artifacts: ArtifactStore, request: Mapping[str, Any], target: Path) -> Path:
    """The whole bundle of the job that is analysed, checked; a sound copy is kept."""
    try:
        _check_bundle(target, request["manifest_sha256"])
    except (BundleDamaged, OSError):
        shutil.rmtree(target, ignore_errors=True)
    else:
        return target
    try:
        artifacts.fetch_folder(request["location"], target)
        _check_bundle(target, request["manifest_sha256"])
    except ArtifactMissing as error:
        raise _unavailable(request, "is no longer in the artifact store") from error
    except BundleDamaged as error:
        raise _unavailable(request, f"is damaged in the artifact store: {error}") from error
    return target


def _check_bundle(folder: Path, sha256: str | None) -> None:
    found = read_bundle(folder)
    if sha256 is not None and found.sha256 != sha256:
        raise BundleDamaged("manifest.json is not the one that was released")


def _unavailable(request: Mapping[str, Any], why: str) -> CannotStart:
    return CannotStart(
        JobError("model_unavailable", f"The model of job {request['job_id']} {why}.", "job_id")
    )
