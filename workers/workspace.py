"""The work folder of a job on this machine: its files, its checkpoints, the spec of the attempt."""

import hashlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from jobspec.catalogue import BaseModelEntry, Catalogue, load_catalogue
from jobspec.defense import DefenseOptions
from jobspec.spec import JobSpec
from service.fine_tuning.attempts import JobError, Lease
from service.fine_tuning.repository import checkpoints_of
from service.kit.artifacts import ArtifactMissing, ArtifactStore
from service.settings import Settings
from service.store.models import Checkpoint, File, Job, ReleasedModel
from workers.adapters import AdapterUnavailable, fetch_adapter, lineage, released

_FOLDER_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")


class CannotStart(RuntimeError):
    """The attempt cannot begin; trying again would not help."""

    def __init__(self, error: JobError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True)
class Plan:
    """What the store says about an attempt, read in one transaction.

    parent: the tuned model that the job continues from. lineage: its name after those of its own
    parents.
    """

    job: Job
    training: File
    validation: File | None
    checkpoint: str | None
    parent: ReleasedModel | None = None
    lineage: tuple[str, ...] = ()


def job_folder(settings: Settings, job_id: str) -> Path:
    """Kept between the attempts of a job, removed when the job has finished."""
    return settings.work_dir / job_id


def read_plan(session: Session, lease: Lease) -> Plan:
    """Job, files and newest stored checkpoint of the attempt. Raises CannotStart."""
    job = session.scalars(select(Job).where(Job.id == lease.job_id)).one()
    newest = session.scalar(
        select(Checkpoint.location)
        .where(Checkpoint.job_id == job.id)
        .order_by(Checkpoint.step_number.desc())
        .limit(1)
    )
    validation = job.validation_file_id
    return Plan(
        job=job,
        training=_file(session, job, job.training_file_id, "training_file"),
        validation=None
        if validation is None
        else _file(session, job, validation, "validation_file"),
        checkpoint=newest,
        parent=None if job.parent_model is None else _parent(session, job, job.parent_model),
        lineage=lineage(session, job.parent_model),
    )


def _parent(session: Session, job: Job, name: str) -> ReleasedModel:
    try:
        return released(session, job.organization_id, name)
    except AdapterUnavailable as error:
        raise CannotStart(error.error) from error


def _file(session: Session, job: Job, file_id: str, param: str) -> File:
    found = session.scalar(
        select(File).where(File.id == file_id, File.organization_id == job.organization_id)
    )
    if found is None or found.deleted_at is not None:
        raise CannotStart(_missing_file(file_id, param))
    return found


def _missing_file(file_id: str, param: str) -> JobError:
    return JobError(
        f"invalid_{param}", f"The file {file_id} is no longer there; upload it again.", param
    )


def prepare(
    settings: Settings, artifacts: ArtifactStore, lease: Lease, plan: Plan
) -> tuple[Path, Path]:
    """Fill the work folder and write the spec; returns (spec file, work folder).

    Files that are there with the right hash are kept. The newest stored checkpoint is fetched when
    this machine does not have it. Raises CannotStart, StorageFull.
    """
    job = plan.job
    folder = job_folder(settings, job.id)
    folder.mkdir(parents=True, exist_ok=True)
    training = fetch_file(artifacts, plan.training, folder / "training.jsonl", "training_file")
    validation = (
        None
        if plan.validation is None
        else fetch_file(artifacts, plan.validation, folder / "validation.jsonl", "validation_file")
    )
    if plan.checkpoint is not None:
        _fetch_checkpoint(artifacts, plan.checkpoint, folder / "checkpoints")
    catalogue = load_catalogue(settings.catalogue)
    model = base_entry(catalogue, job)
    parent = None if plan.parent is None else _parent_adapter(artifacts, plan.parent, folder)
    defense = DefenseOptions.model_validate(job.defense)
    scorer_name = getattr(defense.scheduler, "scorer_model", None)
    scorer = None if scorer_name is None else catalogue.find(scorer_name)
    if scorer_name is not None and scorer is None:
        raise CannotStart(
            JobError(
                "model_unavailable",
                f"The scorer's model {scorer_name} is not in this worker's catalogue.",
            )
        )
    spec = JobSpec(
        job_id=job.id,
        attempt=lease.number,
        model=model,
        training_file=training,
        validation_file=validation,
        seed=job.seed,
        method=job.method["type"],
        hyperparameters=job.hyperparameters,
        defense=defense,
        scorer=scorer,
        evaluation=settings.evaluation,
        checkpoints=settings.checkpoints,
        policy=job.policy,
        cache_dir=settings.cache_dir,
        threads=settings.worker_threads,
        max_line_bytes=settings.max_line_bytes,
        parent_adapter=parent,
        lineage=plan.lineage,
        privacy=(job.request or {}).get("privacy"),
    )
    path = folder / "spec.json"
    path.write_text(spec.model_dump_json(indent=2), "utf-8")
    return path, folder


def base_entry(catalogue: Catalogue, job: Job) -> BaseModelEntry:
    """The job's base model. Raises CannotStart."""
    found = catalogue.find(job.model)
    if found is None:
        raise CannotStart(
            JobError(
                "model_unavailable",
                f"The base model {job.model} is not in this worker's catalogue.",
            )
        )
    return found


def _parent_adapter(artifacts: ArtifactStore, parent: ReleasedModel, folder: Path) -> Path:
    try:
        return fetch_adapter(
            artifacts, parent.id, parent.location, parent.manifest_sha256, folder / "parent"
        )
    except AdapterUnavailable as error:
        raise CannotStart(error.error) from error


def _sha256(path: Path) -> str | None:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def fetch_file(artifacts: ArtifactStore, file: File, target: Path, param: str) -> Path:
    """The file's bytes at `target`, with the right hash. Raises CannotStart."""
    if _sha256(target) == file.sha256:
        return target
    draft = target.with_suffix(".part")
    try:
        with draft.open("wb") as stream:
            for chunk in artifacts.iterate(file.location):
                stream.write(chunk)
    except ArtifactMissing as error:
        draft.unlink(missing_ok=True)
        raise CannotStart(_missing_file(file.id, param)) from error
    if _sha256(draft) != file.sha256:
        draft.unlink()
        raise CannotStart(
            JobError(
                f"invalid_{param}",
                f"The stored bytes of {file.id} are not those that were uploaded; upload it again.",
                param,
            )
        )
    return draft.replace(target)


def _fetch_checkpoint(artifacts: ArtifactStore, location: str, checkpoints: Path) -> None:
    name = location.rpartition("/")[2]
    if not _FOLDER_NAME.match(name) or (checkpoints / name).is_dir():
        return
    checkpoints.mkdir(exist_ok=True)
    try:
        artifacts.fetch_folder(location, checkpoints / name)
    except ArtifactMissing:
        # Without it the attempt starts from an older local checkpoint, or from the beginning.
        return


def checkpoint_key(lease: Lease, folder: Path) -> str:
    """Where a checkpoint is stored. The attempt's number is part of it, so a worker that lost its
    lease without noticing never writes into the folder of its successor."""
    if not _FOLDER_NAME.match(folder.name):
        raise ValueError("a checkpoint's folder name has letters, digits, dot, dash only")
    return f"{checkpoints_of(lease.job_id)}/{lease.number}/{folder.name}"


def discard(settings: Settings, job_id: str) -> None:
    """Remove the work folder of a finished job."""
    shutil.rmtree(job_folder(settings, job_id), ignore_errors=True)
