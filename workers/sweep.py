"""End what an earlier life of this machine left running, and forget what it left on disk."""

import logging
import os
import signal
import socket
from contextlib import suppress

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.fine_tuning.lifecycle import TERMINAL
from service.settings import Settings
from service.store.database import SessionFactory, transaction
from service.store.models import Attempt, Job
from workers.child import process_start
from workers.workspace import discard

logger = logging.getLogger("tunegate.worker")


def host_name() -> str:
    """This machine, as the first part of every worker name."""
    return socket.gethostname()[:60]


def end_strays(session: Session, job_id: str | None = None, before: int | None = None) -> int:
    """Kill training processes of this machine whose attempt is over; returns how many.

    A process counts only if pid and start time are both as recorded: pids are used again. With
    `job_id` and `before`: earlier attempts of that job, whatever state they are in.
    """
    query = select(Attempt).where(
        Attempt.worker.startswith(f"{host_name()}/", autoescape=True), Attempt.pid.is_not(None)
    )
    if job_id is not None and before is not None:
        query = query.where(Attempt.job_id == job_id, Attempt.number < before)
    else:
        query = query.where(Attempt.state != "claimed")
    ended = 0
    for attempt in session.scalars(query):
        pid = attempt.pid
        if pid is None or attempt.pid_started is None:
            continue
        if process_start(pid) == attempt.pid_started:
            logger.warning("job %s: ending stray process %d", attempt.job_id, pid)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            ended += 1
    return ended


def sweep(settings: Settings, factory: SessionFactory) -> None:
    """At a worker's start: strays of this machine, and work folders of finished jobs."""
    with transaction(factory, read_only=True) as session:
        end_strays(session)
    sweep_folders(settings, factory)


def sweep_folders(settings: Settings, factory: SessionFactory) -> None:
    """Remove the work folders of finished jobs."""
    # Listed before the transaction begins: what is listed then has its row in what it sees.
    folders = [item.name for item in settings.work_dir.glob("*") if item.is_dir()]
    with transaction(factory, read_only=True) as session:
        unfinished = set(
            session.scalars(select(Job.id).where(Job.id.in_(folders), Job.status.not_in(TERMINAL)))
        )
    for name in set(folders) - unfinished:
        discard(settings, name)
