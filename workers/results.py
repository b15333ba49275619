"""Work whose result is a folder and nothing else: stored under a key of its own, then told."""

import logging
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.fine_tuning import attempts
from service.fine_tuning.attempts import Lease
from service.kit.artifacts import ArtifactStore
from service.settings import Settings
from service.store.database import SessionFactory, transaction
from service.store.models import Job
from workers.bundles import check_stored, read_bundle
from workers.outcome import ChildExit
from workers.publish import finished_as
from workers.pulse import DATABASE_AWAY

logger = logging.getLogger("tunegate.worker")


class ResultPublisher(ABC):
    """Stores the result folder of one attempt under a key of its own; the row follows.

    room: first part of the key. files: what the folder must hold.
    """

    room: ClassVar[str]
    files: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        settings: Settings,
        factory: SessionFactory,
        artifacts: ArtifactStore,
        lease: Lease,
    ) -> None:
        self._settings = settings
        self._factory = factory
        self._artifacts = artifacts
        self._lease = lease

    @abstractmethod
    def settle(self, session: Session, job: Job, report: dict[str, Any], key: str) -> str:
        """Write what makes the result at `key` the job's; returns the outcome."""

    def publish(self, ended: ChildExit) -> str:
        """Returns how the attempt ended. Can be called again after a database error. Raises
        BundleDamaged, StorageFull, Fenced."""
        assert ended.result is not None
        finished = finished_as(self._factory, self._lease)
        if finished is not None:
            return finished
        folder = Path(str(ended.result.get("bundle")))
        manifest = read_bundle(folder, self.files)
        key = f"{self.room}/{self._lease.job_id}/{self._lease.number}"
        try:
            check_stored(self._artifacts.put_folder(key, folder), manifest)
            with transaction(self._factory) as session:
                job = attempts.own(session, self._lease, self._settings.lease_seconds)
                if job.cancel_requested:
                    outcome = "cancelled"
                    attempts.cancel(session, job)
                else:
                    report = dict(ended.result.get("report") or {})
                    outcome = self.settle(session, job, report, key)
                attempts.finish(session, self._lease, outcome, ended.exit_code, ended.log_tail)
            return outcome
        finally:
            self._forget_unless_named(key)

    def _forget_unless_named(self, key: str) -> None:
        """Remove the bytes that no row names; with the database away nothing is removed."""
        try:
            with transaction(self._factory, read_only=True) as session:
                named = session.scalar(select(Job.artifact).where(Job.id == self._lease.job_id))
        except DATABASE_AWAY:
            return
        if named == key:
            return
        try:
            self._artifacts.delete(key)
        except Exception as error:
            logger.warning("%s was not removed (%s)", key, type(error).__name__)
