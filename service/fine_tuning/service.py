"""Decisions about jobs that exist: who sees one, and when it may be stopped or go on."""

from collections.abc import Sequence

from sqlalchemy.orm import Session

from service.fine_tuning import attempts
from service.fine_tuning.kinds import FINE_TUNE, words
from service.fine_tuning.lifecycle import (
    CANCELLED,
    PAUSED,
    QUEUED,
    VALIDATING_FILES,
    can_cancel,
    can_pause,
    can_resume,
    move,
)
from service.fine_tuning.repository import JobRepository, add_attempt, append_event
from service.fine_tuning.schemas import JobObject
from service.kit.errors import ApiError
from service.store.models import Job


def find(
    session: Session,
    organization_id: str,
    job_id: str,
    *,
    lock: bool = False,
    kind: str = FINE_TUNE,
) -> Job:
    """The job. Raises ApiError 404, the same for one that belongs to somebody else."""
    job = JobRepository(session, organization_id, kind).get(job_id, lock=lock)
    if job is None:
        noun = words(kind).noun.lower()
        raise ApiError(404, f"No such {noun}: {job_id}", "job_not_found", "id")
    return job


def describe(session: Session, jobs: Sequence[Job]) -> list[JobObject]:
    """The jobs as they are answered, with their places in the queue."""
    if not jobs:
        return []
    repository = JobRepository(session, None)
    positions = repository.queue_positions(jobs)
    started = repository.start_times(jobs)
    return [
        JobObject.of(job, queue_position=positions.get(job.id), started_at=started.get(job.id))
        for job in jobs
    ]


def cancel(session: Session, organization_id: str, job_id: str, *, kind: str = FINE_TUNE) -> Job:
    """End a waiting or paused job at once; ask the worker of a running one to let go.

    A cancelled job is returned unchanged. Raises ApiError 400 `job_not_cancellable`.
    """
    job = find(session, organization_id, job_id, lock=True, kind=kind)
    if job.status == CANCELLED:
        return job
    if not can_cancel(job):
        raise _impossible(job, "cancelled", "job_not_cancellable")
    waiting = attempts.withdraw(session, job.id, job.attempt, "cancelled")
    if waiting or job.status == PAUSED:
        attempts.cancel(session, job)
    elif not job.cancel_requested:
        job.cancel_requested = True
        move(job, job.status, stage="cancelling")
        append_event(session, job.id, "info", f"Cancelling the {words(kind).noun.lower()}")
    return job


def pause(session: Session, organization_id: str, job_id: str) -> Job:
    """Pause a waiting job at once; ask the worker of a running one for a checkpoint first.

    Raises ApiError 400 `job_not_pausable`.
    """
    job = find(session, organization_id, job_id, lock=True)
    if not can_pause(job):
        raise _impossible(job, "paused", "job_not_pausable")
    if attempts.withdraw(session, job.id, job.attempt, "paused"):
        attempts.pause(session, job)
    elif not job.pause_requested:
        job.pause_requested = True
        move(job, job.status, stage="pausing")
        append_event(session, job.id, "info", "Pausing the fine-tuning job")
    return job


def resume(session: Session, organization_id: str, job_id: str) -> Job:
    """Queue a paused job again, as a new attempt. Raises ApiError 400 `job_not_resumable`."""
    job = find(session, organization_id, job_id, lock=True)
    if not can_resume(job):
        raise _impossible(job, "resumed", "job_not_resumable")
    # Without a report its files were not validated yet, whoever paused it.
    move(job, VALIDATING_FILES if job.data_report is None else QUEUED)
    job.pause_requested = False
    job.attempt += 1
    add_attempt(session, job)
    append_event(session, job.id, "info", "Fine-tuning job resumed")
    return job


def _impossible(job: Job, what: str, code: str) -> ApiError:
    state = f"{job.status} ({job.stage})" if job.stage else job.status
    return ApiError(400, f"Job {job.id} is {state} and cannot be {what}.", code, "id")
