"""Gate runs as a worker sees them: a stored model is judged again, and stays where it is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from jobspec.catalogue import load_catalogue
from jobspec.gate_run import GateRunSpec
from jobspec.spec import EvaluationOptions
from service.fine_tuning.attempts import Lease
from service.fine_tuning.lifecycle import SUCCEEDED, move
from service.fine_tuning.repository import append_event
from service.kit.artifacts import ArtifactStore
from service.settings import Settings
from service.store.models import File, Job
from workers.adapters import AdapterUnavailable, fetch_adapter, lineage
from workers.bundles import REPORT
from workers.publish import gate_results
from workers.results import ResultPublisher
from workers.workspace import CannotStart, base_entry, fetch_file, job_folder

ROOM = "gate_runs"
SAMPLES = "evaluation_samples.parquet"
# What the job that made the model measured while it tuned, and what nobody can measure later.
ONLY_WHILE_TUNING = ("defense.canary_auc",)


@dataclass(frozen=True)
class GatePlan:
    """What the store says about an attempt. Files that were deleted since are left out."""

    job: Job
    source: Job
    lineage: tuple[str, ...]
    training: File | None
    validation: File | None


def opening(job: Job, number: int) -> list[str]:
    """What the log says when an attempt begins."""
    asked = (job.request or {}).get("model")
    if number == 1:
        return [f"Measuring the model {asked}"]
    return [f"Gate run continues (attempt {number})"]


def read_plan(session: Session, lease: Lease) -> GatePlan:
    """The run, the job that made its model, and the files of that job."""
    job = session.scalars(select(Job).where(Job.id == lease.job_id)).one()
    request: dict[str, Any] = job.request or {}
    source = session.scalars(select(Job).where(Job.id == request["source_job_id"])).one()
    name = request["model"]
    return GatePlan(
        job=job,
        source=source,
        lineage=(*lineage(session, source.parent_model), name),
        training=_file(session, source, source.training_file_id),
        validation=_file(session, source, source.validation_file_id),
    )


def prepare(
    settings: Settings, artifacts: ArtifactStore, lease: Lease, plan: GatePlan
) -> tuple[Path, Path]:
    """Fetch the adapter and write the spec; returns (spec file, work folder). Raises CannotStart,
    StorageFull."""
    job, request = plan.job, plan.job.request or {}
    folder = job_folder(settings, job.id)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        adapter = fetch_adapter(
            artifacts,
            request["model"],
            request["location"],
            request.get("manifest_sha256"),
            folder / "adapter",
        )
    except AdapterUnavailable as error:
        raise CannotStart(error.error) from error
    measured = (plan.source.report or {}).get("metrics") or {}
    spec = GateRunSpec(
        run_id=job.id,
        model=base_entry(load_catalogue(settings.catalogue), job),
        adapter=adapter,
        lineage=plan.lineage,
        evaluation=evaluation_options(settings, request),
        policy=job.policy,
        training_file=None
        if plan.training is None
        else fetch_file(artifacts, plan.training, folder / "training.jsonl", "training_file"),
        validation_file=None
        if plan.validation is None
        else fetch_file(artifacts, plan.validation, folder / "validation.jsonl", "validation_file"),
        measured={name: measured[name] for name in ONLY_WHILE_TUNING if name in measured},
        seed=job.seed,
        max_line_bytes=settings.max_line_bytes,
        cache_dir=settings.cache_dir,
        threads=settings.worker_threads,
    )
    path = folder / "spec.json"
    path.write_text(spec.model_dump_json(indent=2), "utf-8")
    return path, folder


def evaluation_options(settings: Settings, request: dict[str, Any]) -> EvaluationOptions:
    """The operator's options with what the run was asked to do less of."""
    return EvaluationOptions.model_validate(
        {**settings.evaluation.model_dump(), **(request.get("evaluation") or {})}
    )


class GateRunPublisher(ResultPublisher):
    """Report and samples; a run succeeds whatever its verdict."""

    room = ROOM
    files = (REPORT, SAMPLES)

    def settle(self, session: Session, job: Job, report: dict[str, Any], key: str) -> str:
        """The run has succeeded whatever it found; the verdict is its result."""
        job.report = report
        job.artifact = key
        job.pause_requested = False
        verdict = str((report.get("gate") or {}).get("verdict"))
        append_event(
            session,
            job.id,
            "info" if verdict == "passed" else "warn",
            f"The verdict of the gate is: {verdict}",
            type="moderation_checks",
            data={"blocked": False, "verdict": verdict, "results": gate_results(report)},
        )
        append_event(session, job.id, "info", "The gate run has successfully completed")
        move(job, SUCCEEDED)
        return SUCCEEDED


def _file(session: Session, source: Job, file_id: str | None) -> File | None:
    return session.scalar(
        select(File).where(
            File.id == file_id,
            File.organization_id == source.organization_id,
            File.deleted_at.is_(None),
        )
    )
