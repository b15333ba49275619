"""Attempts: who may work on a job, proven again by every write.

(job id, attempt number, worker) is the fencing token. A claim is one conditional update; every
later write first renews the lease with the token in its condition, so a worker that froze, lost
its lease and woke up changes nothing. The queue's message is only a wake-up: the row decides.

Lock order is job before attempt everywhere, as in the gateway, so that PostgreSQL never has to
break a deadlock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from sqlalchemy import CursorResult, Update, exists, select, update
from sqlalchemy.orm import Session

from service.fine_tuning.kinds import words
from service.fine_tuning.lifecycle import (
    CANCELLED,
    FAILED,
    PAUSED,
    QUEUED,
    RUNNING,
    VALIDATING_FILES,
    move,
)
from service.fine_tuning.repository import add_attempt, append_event
from service.kit.clock import now
from service.store.models import Attempt, Job, Outbox

CLAIMABLE = (VALIDATING_FILES, QUEUED)
ALIVE = (VALIDATING_FILES, QUEUED, RUNNING)
RETRY_SECONDS = 1.0
LOG_TAIL_CHARACTERS = 16_384


class Fenced(RuntimeError):
    """The attempt belongs to somebody else now, or has ended; stop and write nothing."""


@dataclass(frozen=True)
class Lease:
    """The fencing token of one claimed attempt."""

    job_id: str
    number: int
    worker: str


@dataclass(frozen=True)
class Control:
    """What the job's owner asked for, read with each heartbeat."""

    cancel: bool
    pause: bool


@dataclass(frozen=True)
class JobError:
    """Why a job failed, in the fields of the job's `error` object."""

    code: str
    message: str
    param: str | None = None
    details: tuple[Any, ...] = field(default=())

    def body(self) -> dict[str, Any]:
        """The stored object; `errors` is there only when there are findings to list."""
        error: dict[str, Any] = {"code": self.code, "message": self.message, "param": self.param}
        if self.details:
            error["errors"] = list(self.details)
        return error


def _hits(session: Session, statement: Update) -> bool:
    result = session.execute(statement.execution_options(synchronize_session=False))
    return cast("CursorResult[Any]", result).rowcount == 1


def find_job(session: Session, job_id: str) -> Job | None:
    """The job, whoever's it is."""
    return session.scalar(select(Job).where(Job.id == job_id))


def of_job(session: Session, job_id: str) -> Sequence[Attempt]:
    """All attempts of a job, the first one first."""
    return session.scalars(
        select(Attempt).where(Attempt.job_id == job_id).order_by(Attempt.number)
    ).all()


def lock_job(session: Session, job_id: str) -> Job | None:
    """The job, read afresh and locked until the transaction ends."""
    return session.scalar(
        select(Job)
        .where(Job.id == job_id)
        .with_for_update()
        .execution_options(populate_existing=True)
    )


def claim(session: Session, job_id: str, number: int, worker: str, lease_seconds: float) -> bool:
    """Take a waiting attempt; False when it is taken, not current, or its job does not wait.

    `worker` must be unique for each claim: it is part of the fencing token.
    """
    lock_job(session, job_id)
    moment = now()
    return _hits(
        session,
        update(Attempt)
        .where(
            Attempt.job_id == job_id,
            Attempt.number == number,
            Attempt.state == "queued",
            Attempt.available_at <= moment,
            exists().where(
                Job.id == Attempt.job_id,
                Job.attempt == Attempt.number,
                Job.status.in_(CLAIMABLE),
                Job.cancel_requested.is_(False),
            ),
        )
        .values(
            state="claimed",
            worker=worker,
            started_at=moment,
            heartbeat_at=moment,
            lease_expires_at=moment + lease_seconds,
        ),
    )


def _held(lease: Lease) -> Update:
    return update(Attempt).where(
        Attempt.job_id == lease.job_id,
        Attempt.number == lease.number,
        Attempt.worker == lease.worker,
        Attempt.state == "claimed",
    )


def heartbeat(session: Session, lease: Lease, lease_seconds: float) -> Control:
    """Renew the lease and read what the owner wants. Raises Fenced when the lease is gone.

    A lease that ran out but was not reaped yet is renewed: nobody else can have it.
    """
    moment = now()
    renewed = _held(lease).values(heartbeat_at=moment, lease_expires_at=moment + lease_seconds)
    if not _hits(session, renewed):
        raise Fenced(f"attempt {lease.number} of job {lease.job_id} is no longer ours")
    row = session.execute(
        select(Job.cancel_requested, Job.pause_requested).where(Job.id == lease.job_id)
    ).one()
    return Control(cancel=bool(row.cancel_requested), pause=bool(row.pause_requested))


def own(session: Session, lease: Lease, lease_seconds: float) -> Job:
    """Start of every writing transaction of a worker: the job, locked, and the lease renewed.

    Raises Fenced, and then the transaction must be left without a write.
    """
    job = lock_job(session, lease.job_id)
    heartbeat(session, lease, lease_seconds)
    if job is None or job.attempt != lease.number or job.status not in ALIVE:
        raise Fenced(f"job {lease.job_id} is no longer at attempt {lease.number}")
    return job


def record_process(session: Session, lease: Lease, pid: int, started: float | None) -> None:
    """Remember the training process, so that a later sweep can recognise and end it."""
    if not _hits(session, _held(lease).values(pid=pid, pid_started=started)):
        raise Fenced(f"attempt {lease.number} of job {lease.job_id} is no longer ours")


def finish(
    session: Session,
    lease: Lease,
    outcome: str,
    exit_code: int | None = None,
    log_tail: str | None = None,
) -> None:
    """End the attempt in a final way (`outcome` says how). Raises Fenced."""
    _end(session, lease, "finished", outcome, exit_code, log_tail)


def release(
    session: Session,
    lease: Lease,
    outcome: str,
    exit_code: int | None = None,
    log_tail: str | None = None,
) -> None:
    """Give the attempt back early: paused, or the worker is shutting down. Raises Fenced."""
    _end(session, lease, "released", outcome, exit_code, log_tail)


def _end(
    session: Session,
    lease: Lease,
    state: str,
    outcome: str,
    exit_code: int | None,
    log_tail: str | None,
) -> None:
    ended = _held(lease).values(
        state=state,
        outcome=outcome,
        exit_code=exit_code,
        log_tail=None if log_tail is None else log_tail[-LOG_TAIL_CHARACTERS:],
        finished_at=now(),
        lease_expires_at=None,
    )
    if not _hits(session, ended):
        raise Fenced(f"attempt {lease.number} of job {lease.job_id} is no longer ours")


def lose(session: Session, attempt_id: int) -> bool:
    """Take an attempt away from a worker whose lease ran out; False when it was renewed."""
    moment = now()
    return _hits(
        session,
        update(Attempt)
        .where(
            Attempt.id == attempt_id,
            Attempt.state == "claimed",
            Attempt.lease_expires_at < moment,
        )
        .values(state="lost", outcome="lost", finished_at=moment, lease_expires_at=None),
    )


def withdraw(session: Session, job_id: str, number: int, outcome: str) -> bool:
    """Close an attempt that nobody has claimed; False when a worker was faster."""
    return _hits(
        session,
        update(Attempt)
        .where(Attempt.job_id == job_id, Attempt.number == number, Attempt.state == "queued")
        .values(state="finished", outcome=outcome, finished_at=now()),
    )


def fail(session: Session, job: Job, error: JobError) -> None:
    """The job's final failure, with its event."""
    move(job, FAILED)
    job.error = error.body()
    job.fine_tuned_model = None
    append_event(
        session, job.id, "error", error.message, data={"code": error.code, "param": error.param}
    )


def cancel(session: Session, job: Job) -> None:
    """The job's end on its owner's request, with its event."""
    move(job, CANCELLED)
    append_event(session, job.id, "info", f"{words(job.kind).noun} cancelled")


def pause(session: Session, job: Job) -> None:
    """The job rests until it is resumed, with its event."""
    move(job, PAUSED)
    job.pause_requested = False
    append_event(session, job.id, "info", f"{words(job.kind).noun} paused")


def requeue(
    session: Session,
    job: Job,
    reason: str,
    failure: JobError | None,
    max_attempts: int,
) -> bool:
    """Give the job its next attempt (number + 1, with a wake-up); False when the job ended instead.

    `failure` is what the job fails with once `max_attempts` tries have failed; None does not count
    as a failure (the worker was told to stop). A wish to cancel or pause that was still open is
    carried out here, since no worker is left to do it.
    """
    if job.cancel_requested:
        cancel(session, job)
        return False
    if job.pause_requested:
        pause(session, job)
        return False
    delay = 0.0
    if failure is not None:
        job.failures += 1
        if job.failures >= max_attempts:
            fail(session, job, failure)
            return False
        delay = RETRY_SECONDS * 2 ** (job.failures - 1)
    move(job, QUEUED if job.status == RUNNING else job.status, stage="queued")
    job.attempt += 1
    add_attempt(session, job).available_at = now() + delay
    append_event(
        session,
        job.id,
        "info" if failure is None else "warn",
        f"{reason}; attempt {job.attempt} goes on from {words(job.kind).last}",
    )
    return True


def expired(session: Session, limit: int = 50) -> list[int]:
    """Ids of claims whose lease ran out, oldest first."""
    return list(
        session.scalars(
            select(Attempt.id)
            .where(Attempt.state == "claimed", Attempt.lease_expires_at < now())
            .order_by(Attempt.lease_expires_at)
            .limit(limit)
        )
    )


def lock_expired(session: Session, attempt_id: int) -> Job | None:
    """The job of an expired claim, locked; None when somebody else is dealing with it."""
    return session.scalar(
        select(Job)
        .join(Attempt, Attempt.job_id == Job.id)
        .where(Attempt.id == attempt_id, Attempt.state == "claimed")
        .with_for_update(skip_locked=True, of=Job)
        .execution_options(populate_existing=True)
    )


def claimable(session: Session, limit: int = 5) -> Sequence[tuple[str, int]]:
    """(job id, attempt number) of waiting attempts, oldest first, for a worker with a free slot."""
    rows = session.execute(
        select(Attempt.job_id, Attempt.number)
        .join(Job, Job.id == Attempt.job_id)
        .where(
            Attempt.state == "queued",
            Attempt.available_at <= now(),
            Attempt.number == Job.attempt,
            Job.status.in_(CLAIMABLE),
            Job.cancel_requested.is_(False),
        )
        .order_by(Attempt.available_at, Attempt.id)
        .limit(limit)
    )
    return [(row.job_id, row.number) for row in rows]


def due_wake_ups(session: Session, limit: int = 100) -> list[tuple[int, str, int]]:
    """(outbox id, job id, attempt) of unsent wake-ups whose attempt may start now.

    Nothing is locked: a broker may be slow, and a wake-up that two dispatchers send is harmless.
    """
    waits = exists().where(
        Attempt.job_id == Outbox.job_id,
        Attempt.number == Outbox.attempt,
        Attempt.available_at > now(),
    )
    rows = session.execute(
        select(Outbox.id, Outbox.job_id, Outbox.attempt)
        .where(Outbox.sent_at.is_(None), ~waits)
        .order_by(Outbox.id)
        .limit(limit)
    )
    return [(row.id, row.job_id, row.attempt) for row in rows]
