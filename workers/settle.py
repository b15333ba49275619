"""The last write of an attempt: its own end and what becomes of the job, in one transaction."""

import errno

from service.fine_tuning import attempts
from service.fine_tuning.attempts import JobError, Lease
from service.settings import Settings
from service.store.database import SessionFactory, transaction
from workers.bundles import BundleDamaged
from workers.outcome import STORAGE_FULL, ChildExit, Ending

_REASONS = {
    "out_of_memory": "The training process ran out of memory",
    "storage_full": "Storage was full",
    "worker_lost": "The training process was ended from outside",
    "shutdown": "The worker was shut down",
}


def interrupted(error: Exception) -> Ending:
    """The ending of an attempt that the worker itself could not carry through."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Ending("retry", "storage_full", STORAGE_FULL)
    words = (
        f"The result was damaged: {error}."
        if isinstance(error, BundleDamaged)
        else f"The worker could not run the job ({type(error).__name__})."
    )
    return Ending("retry", "internal_error", JobError("internal_error", words))


def settle(
    settings: Settings,
    factory: SessionFactory,
    lease: Lease,
    ending: Ending,
    ended: ChildExit | None,
) -> None:
    """Carry out every ending but "publish" and "fenced". Raises Fenced."""
    with transaction(factory) as session:
        job = attempts.own(session, lease, settings.lease_seconds)
        end = attempts.release if ending.kind in ("paused", "released") else attempts.finish
        exit_code, log_tail = (None, None) if ended is None else (ended.exit_code, ended.log_tail)
        end(session, lease, ending.label, exit_code, log_tail)
        match ending.kind:
            case "cancelled":
                attempts.cancel(session, job)
            case "paused":
                # A cancel that came after the pause still counts.
                if job.cancel_requested:
                    attempts.cancel(session, job)
                else:
                    attempts.pause(session, job)
            case "failed":
                assert ending.error is not None
                attempts.fail(session, job, ending.error)
            case "retry" | "released":
                attempts.requeue(
                    session,
                    job,
                    _REASONS.get(ending.label, "The training process failed"),
                    ending.error,
                    settings.max_attempts,
                )
            case _:
                raise ValueError(f"nothing to settle for {ending.kind}")
