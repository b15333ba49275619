"""The dispatcher: sends wake-ups from the outbox and takes attempts back from lost workers.

Run as a process of its own (`python -m service.queue`) or as a thread beside the gateway. It holds
no state: several may run, and each may be stopped at any moment.
"""

import logging
import random
import signal
import threading
from collections.abc import Iterator
from typing import Protocol

from celery import Celery
from sqlalchemy import delete, select, update

from service.fine_tuning import attempts
from service.fine_tuning.lifecycle import TERMINAL
from service.fine_tuning.repository import CHECKPOINTS, checkpoints_of
from service.kit.artifacts import ArtifactStore
from service.kit.broker import QUEUE_NAME, TASK_NAME, create_celery
from service.kit.clock import now
from service.settings import Settings
from service.store.database import SessionFactory, create_engine, session_factory, transaction
from service.store.models import Job, Outbox

logger = logging.getLogger("tunegate.queue")

TICK_SECONDS = 0.2
PRUNE_SECONDS = 600.0
KEPT_SECONDS = 86_400.0
BATCH = 500
LONGEST_PAUSE_SECONDS = 30.0

WORKER_LOST = attempts.JobError(
    "worker_lost",
    "The worker of this job was lost as many times as a job may be tried again (its machine "
    "stopped, or the process was killed). Create the job again once the worker is healthy.",
)


class Task(Protocol):
    """One duty of the dispatcher."""

    def run(self) -> int:
        """Do what is due now; returns how many rows were dealt with."""


class Dispatcher:
    """Outbox to broker. A row counts as sent only after the broker took the message."""

    def __init__(self, factory: SessionFactory, celery: Celery) -> None:
        self._factory = factory
        self._celery = celery

    def run(self) -> int:
        with transaction(self._factory, read_only=True) as session:
            due = attempts.due_wake_ups(session)
        sent: list[int] = []
        try:
            for row_id, job_id, number in due:
                self._celery.send_task(
                    TASK_NAME,
                    args=[job_id, number],
                    queue=QUEUE_NAME,
                    ignore_result=True,
                    retry=False,
                )
                sent.append(row_id)
        finally:
            if sent:
                with transaction(self._factory) as session:
                    session.execute(update(Outbox).where(Outbox.id.in_(sent)).values(sent_at=now()))
        return len(sent)


class Reaper:
    """Expired leases to the next attempt, or to a failed job after the last one."""

    def __init__(self, factory: SessionFactory, max_attempts: int) -> None:
        self._factory = factory
        self._max_attempts = max_attempts

    def run(self) -> int:
        with transaction(self._factory, read_only=True) as session:
            overdue = attempts.expired(session)
        return sum(self._take_back(attempt_id) for attempt_id in overdue)

    def _take_back(self, attempt_id: int) -> int:
        with transaction(self._factory) as session:
            job = attempts.lock_expired(session, attempt_id)
            if job is None or not attempts.lose(session, attempt_id):
                return 0
            if job.status not in attempts.ALIVE:
                return 1
            logger.warning("job %s: attempt %d lost its worker", job.id, job.attempt)
            attempts.requeue(session, job, "The worker was lost", WORKER_LOST, self._max_attempts)
            return 1


class Pruner:
    """Forget wake-ups that were sent long ago, and remove stored checkpoints of finished jobs that
    no worker was left to remove. Their rows stay as a record."""

    def __init__(self, factory: SessionFactory, artifacts_url: str) -> None:
        self._factory = factory
        self._artifacts_url = artifacts_url

    def run(self) -> int:
        forgotten = self._forget_wake_ups()
        return forgotten + self._remove_checkpoints()

    def _remove_checkpoints(self) -> int:
        artifacts = ArtifactStore.from_url(self._artifacts_url)
        stored = {key.split("/")[1] for key in artifacts.list(CHECKPOINTS)}
        finished: list[str] = []
        with transaction(self._factory, read_only=True) as session:
            for batch in _batches(sorted(stored)):
                finished += session.scalars(
                    select(Job.id).where(Job.id.in_(batch), Job.status.in_(TERMINAL))
                )
        for job_id in finished:
            artifacts.delete(checkpoints_of(job_id))
        return len(finished)

    def _forget_wake_ups(self) -> int:
        with transaction(self._factory) as session:
            gone = session.execute(delete(Outbox).where(Outbox.sent_at < now() - KEPT_SECONDS))
            return int(getattr(gone, "rowcount", 0))


def _batches(ids: list[str]) -> Iterator[list[str]]:
    """A statement takes a limited number of values."""
    for start_at in range(0, len(ids), BATCH):
        yield ids[start_at : start_at + BATCH]


def repeat(task: Task, every_seconds: float, stop: threading.Event) -> None:
    """Run `task` again and again until `stop` is set.

    An error is logged by its class only (a broker's message may hold its URL), and the pauses grow
    with a random part, so that many processes do not return to a recovering server at once.
    """
    failures = 0
    while not stop.is_set():
        try:
            task.run()
            failures = 0
            stop.wait(every_seconds)
        except Exception as error:
            failures += 1
            pause = min(LONGEST_PAUSE_SECONDS, 0.5 * 2 ** min(failures, 10))
            pause *= random.uniform(0.5, 1.0)
            logger.warning(
                "%s failed (%s), again in %.1f s",
                type(task).__name__,
                type(error).__name__,
                pause,
            )
            stop.wait(pause)


def start(
    settings: Settings, factory: SessionFactory, stop: threading.Event
) -> list[threading.Thread]:
    """Start the three duties in threads of their own: a slow broker must not delay the reaper."""
    duties: list[tuple[Task, float]] = [
        (Dispatcher(factory, create_celery(settings, "tunegate-dispatcher")), TICK_SECONDS),
        (
            Reaper(factory, settings.max_attempts),
            min(5.0, max(TICK_SECONDS, settings.lease_seconds / 6)),
        ),
        (Pruner(factory, settings.artifacts), PRUNE_SECONDS),
    ]
    threads = [
        threading.Thread(
            target=repeat, args=(task, every, stop), name=type(task).__name__, daemon=True
        )
        for task, every in duties
    ]
    for thread in threads:
        thread.start()
    return threads


def main() -> None:
    """Run until SIGTERM or SIGINT."""
    settings = Settings.load()
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    engine = create_engine(settings, small_pool=True)
    threads = start(settings, session_factory(engine), stop)
    logger.info("dispatcher ready")
    stop.wait()
    for thread in threads:
        thread.join(timeout=10)
    engine.dispose()


if __name__ == "__main__":
    main()
