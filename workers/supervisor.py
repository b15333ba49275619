"""One attempt from claim to end: prepare, start the training process, watch it, settle.

This process never imports torch: memory goes back to the system when the child ends, and a child
that crashes takes nothing else with it.
"""

import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from service.fine_tuning import attempts
from service.fine_tuning.attempts import Fenced, Lease
from service.fine_tuning.lifecycle import RUNNING, TERMINAL, VALIDATING_FILES, move
from service.fine_tuning.repository import append_event, checkpoints_of
from service.kit.artifacts import ArtifactStore
from service.settings import Settings
from service.store.database import SessionFactory, transaction
from workers.child import Child, child_environment
from workers.kinds import Kind, kind_of
from workers.memory import oom_kills, ran_out_of_memory
from workers.outcome import Ask, ChildExit, Ending, classify
from workers.pulse import DATABASE_AWAY, Pulse
from workers.recorder import Recorder
from workers.settle import interrupted, settle
from workers.sweep import end_strays, host_name
from workers.watch import LOOP_SECONDS, Watch
from workers.workspace import CannotStart, discard

T = TypeVar("T")

logger = logging.getLogger("tunegate.worker")

PIPELINE = (sys.executable, "-m", "workers.pipeline")
DATABASE_RETRY_SECONDS = 1.0


def worker_name() -> str:
    """A name for one claim: machine, process, and a random part that makes it unique."""
    return f"{host_name()}/{os.getpid()}/{secrets.token_hex(6)}"


class Supervisor:
    """Runs attempts, one at a time per call of `run`; calls may come from several threads.

    `command` starts the training process (the kind's own words, spec file and `--work FOLDER` are
    appended); setting `stopping` makes every running attempt write a checkpoint and go back to the
    queue.
    """

    def __init__(
        self,
        settings: Settings,
        factory: SessionFactory,
        artifacts: ArtifactStore,
        *,
        command: Sequence[str] = PIPELINE,
        stopping: threading.Event | None = None,
        grace_seconds: float = 20.0,
    ) -> None:
        self._settings = settings
        self._factory = factory
        self._artifacts = artifacts
        self._command = tuple(command)
        self._stopping = stopping or threading.Event()
        self._grace_seconds = grace_seconds

    def run(self, job_id: str, number: int) -> bool:
        """Claim the attempt and see it through; False when it was not to be had."""
        lease = Lease(job_id, number, worker_name())
        kind = self._claim(lease)
        if kind is None:
            return False
        logger.info("job %s: attempt %d claimed", job_id, number)
        try:
            with Pulse(
                self._factory,
                lease,
                self._settings.lease_seconds,
                self._settings.heartbeat_seconds,
            ) as pulse:
                label = self._attend(lease, pulse, kind)
            logger.info("job %s: attempt %d ended (%s)", job_id, number, label)
        except Fenced:
            logger.warning("job %s: attempt %d was taken over", job_id, number)
        self._tidy(job_id)
        return True

    def _claim(self, lease: Lease) -> Kind | None:
        with transaction(self._factory) as session:
            if not attempts.claim(
                session, lease.job_id, lease.number, lease.worker, self._settings.lease_seconds
            ):
                return None
            job = attempts.own(session, lease, self._settings.lease_seconds)
            kind = kind_of(job.kind)
            for words in kind.opening(job, lease.number):
                append_event(session, job.id, "info", words)
            validates = job.status == VALIDATING_FILES
            move(job, VALIDATING_FILES if validates else RUNNING, stage="validating")
        return kind

    def _attend(self, lease: Lease, pulse: Pulse, kind: Kind) -> str:
        """Everything between the claim and the end; returns the attempt's outcome."""
        ended: ChildExit | None = None
        try:
            plan = self._persist(lease, lambda: self._read_plan(lease, kind))
            spec, folder = kind.prepare(self._settings, self._artifacts, lease, plan)
            command = [*self._command, *kind.command, str(spec), "--work", str(folder)]
            ended = self._supervise(lease, pulse, command)
            ending = classify(ended)
            if ending.kind == "publish":
                return self._publish(lease, ended, kind)
        except Fenced:
            raise
        except CannotStart as error:
            ending = Ending("failed", error.error.code, error.error)
        except Exception as error:
            logger.exception("job %s: attempt %d could not be run", lease.job_id, lease.number)
            ending = interrupted(error)
        if ending.kind == "fenced":
            raise Fenced(f"attempt {lease.number} of job {lease.job_id} was taken over")
        self._persist(lease, lambda: settle(self._settings, self._factory, lease, ending, ended))
        return ending.label

    def _read_plan(self, lease: Lease, kind: Kind) -> Any:
        with transaction(self._factory) as session:
            end_strays(session, lease.job_id, before=lease.number)
            return kind.read_plan(session, lease)

    def _supervise(self, lease: Lease, pulse: Pulse, command: Sequence[str]) -> ChildExit:
        """Start the process, follow it to its end, leave nothing of its group behind."""
        kills_before = oom_kills()
        environment = child_environment(os.environ, os.getpid(), self._settings.worker_threads)
        recorder = Recorder(self._settings, self._factory, self._artifacts, lease)
        child = Child(command, environment)
        try:
            watch = Watch(child, pulse, recorder, self._stopping, self._grace_seconds)
            self._persist(lease, lambda: self._record_process(lease, child))
            watch.follow(self._settings.time_limit_seconds)
            exit_code = child.close()
            watch.take_events(0.0)
            if watch.asked not in (Ask.FENCED, Ask.CANCEL):
                recorder.finish_copies()
                self._persist(lease, recorder.flush)
        finally:
            child.close()
            recorder.close()
        log_tail = child.log_tail()
        return ChildExit(
            exit_code=exit_code,
            log_tail=log_tail,
            result=watch.result,
            failure=watch.failure,
            asked=watch.asked or self._asked_by_others(exit_code),
            out_of_memory=ran_out_of_memory(exit_code, log_tail, kills_before, oom_kills()),
            time_limit_seconds=self._settings.time_limit_seconds,
        )

    def _asked_by_others(self, exit_code: int) -> Ask | None:
        """A service manager that stops a whole group reaches the child before we do."""
        stopped = exit_code in (signal.SIGTERM, -signal.SIGTERM)
        return Ask.SHUTDOWN if stopped and self._stopping.wait(LOOP_SECONDS) else None

    def _record_process(self, lease: Lease, child: Child) -> None:
        with transaction(self._factory) as session:
            attempts.record_process(session, lease, child.pid, child.started)

    def _publish(self, lease: Lease, ended: ChildExit, kind: Kind) -> str:
        publisher = kind.publisher(self._settings, self._factory, self._artifacts, lease)
        return self._persist(lease, lambda: publisher.publish(ended))

    def _persist(self, lease: Lease, write: Callable[[], T]) -> T:
        """Write, waiting for a database that is away as long as nobody shuts this worker down."""
        while True:
            try:
                return write()
            except DATABASE_AWAY as error:
                logger.warning(
                    "job %s: the database is away (%s)", lease.job_id, type(error).__name__
                )
                if self._stopping.wait(DATABASE_RETRY_SECONDS):
                    raise Fenced("stopped while the database was away") from error

    def _tidy(self, job_id: str) -> None:
        """Remove the work folder and the stored checkpoints once the job has finished."""
        try:
            with transaction(self._factory, read_only=True) as session:
                job = attempts.find_job(session, job_id)
        except DATABASE_AWAY:
            return
        if job is not None and job.status not in TERMINAL:
            return
        discard(self._settings, job_id)
        try:
            self._artifacts.delete(checkpoints_of(job_id))
        except Exception as error:
            # The dispatcher removes them later.
            logger.warning(
                "job %s: its checkpoints were not removed (%s)", job_id, type(error).__name__
            )
