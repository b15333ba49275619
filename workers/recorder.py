"""The child's events into the store, in batches, each proving first that the attempt is ours."""

import logging
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.fine_tuning.attempts import Lease, own
from service.fine_tuning.lifecycle import (
    QUEUED,
    RUNNING,
    STAGES,
    VALIDATING_FILES,
    move,
)
from service.fine_tuning.repository import add_checkpoint, append_event, upsert_metrics
from service.kit.artifacts import ArtifactStore, StorageFull
from service.settings import Settings
from service.store.database import SessionFactory, transaction
from service.store.models import Checkpoint, Job, Metric, Organization
from workers.child import Message
from workers.naming import checkpoint_name
from workers.workspace import checkpoint_key

logger = logging.getLogger("tunegate.worker")

# What OpenAI's metrics event and checkpoint carry; the metrics table keeps everything.
EVENT_METRICS = (
    "train_loss",
    "train_mean_token_accuracy",
    "valid_loss",
    "valid_mean_token_accuracy",
    "full_valid_loss",
    "full_valid_mean_token_accuracy",
)
# The newest count is enough, and nobody looks more often.
PROGRESS_SECONDS = 1.0
_LEVELS = frozenset({"info", "warn", "error"})


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint whose bytes are in the artifact store."""

    step: int
    location: str
    metrics: dict[str, Any]


class Recorder:
    """Writes what one attempt reports. Checkpoints are copied by one background thread, so that a
    slow artifact store never delays a cancel; their rows follow when the copy is complete."""

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
        self._pending: list[Message] = []
        self._copies: list[Future[StoredCheckpoint | Message]] = []
        self._stored: list[StoredCheckpoint] = []
        self._progress: dict[str, Any] | None = None
        self._progress_at = -math.inf
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")

    def add(self, events: list[Message]) -> None:
        """Take events over; they are written by the next `flush`."""
        for event in events:
            if event["event"] == "checkpoint":
                self._copies.append(self._copier.submit(self._copy, event))
            elif event["event"] == "progress":
                self._progress = {name: event.get(name) for name in ("stage", "done", "total")}
            else:
                if event["event"] == "stage":
                    # What the last stage counted must not show under the next one.
                    self._progress = None
                self._pending.append(event)

    def flush(self) -> None:
        """Write everything that is due, in one transaction; nothing is lost if that fails.

        Raises Fenced, or a database error, after which it can be called again.
        """
        done = [copy for copy in self._copies if copy.done()]
        for copy in done:
            outcome = copy.result()
            if isinstance(outcome, StoredCheckpoint):
                self._stored.append(outcome)
            else:
                self._pending.append(outcome)
        self._copies = [copy for copy in self._copies if copy not in done]
        progress = self._progress if self._progress_due() else None
        if not self._pending and not self._stored and progress is None:
            return
        with transaction(self._factory) as session:
            job = own(session, self._lease, self._settings.lease_seconds)
            metrics = [event for event in self._pending if event["event"] == "metrics"]
            known = _known_steps(session, job.id, metrics)
            for event in self._pending:
                _record(session, job, event, known)
            upsert_metrics(session, job.id, (_measured(event) for event in metrics))
            for stored in self._stored:
                self._record_checkpoint(session, job, stored)
            if progress is not None:
                job.progress = progress
            superseded = self._superseded(session) if self._stored else []
        self._pending, self._stored = [], []
        if progress is not None:
            self._progress, self._progress_at = None, time.monotonic()
        for location in superseded:
            self._delete(location)

    def _delete(self, location: str) -> None:
        try:
            self._artifacts.delete(location)
        except Exception as error:
            logger.warning(
                "job %s: an old checkpoint was not removed (%s)",
                self._lease.job_id,
                type(error).__name__,
            )

    def _progress_due(self) -> bool:
        return time.monotonic() - self._progress_at >= PROGRESS_SECONDS

    def _superseded(self, session: Session) -> list[str]:
        """Stored states just older than those that are kept; their rows remain as a record."""
        return list(
            session.scalars(
                select(Checkpoint.location)
                .where(Checkpoint.job_id == self._lease.job_id)
                .order_by(Checkpoint.step_number.desc())
                .offset(self._settings.checkpoints.keep)
                .limit(len(self._stored))
            )
        )

    def finish_copies(self) -> None:
        """Wait until checkpoints under way are stored."""
        self._copier.shutdown(wait=True)

    def close(self) -> None:
        """Drop copies that have not begun."""
        self._copier.shutdown(wait=True, cancel_futures=True)

    def _copy(self, event: Message) -> StoredCheckpoint | Message:
        step = int(event["step"])
        folder = Path(str(event["folder"]))
        try:
            key = checkpoint_key(self._lease, folder)
            self._artifacts.put_folder(key, folder)
        except StorageFull:
            return _warning(f"Checkpoint at step {step} was not stored: the artifact store is full")
        except Exception as error:
            # Most often the process has already replaced it by a newer one. A remote store raises
            # errors of its own kinds, and none of them is a reason to end a healthy attempt.
            logger.warning(
                "job %s: checkpoint at step %d was not stored (%s)",
                self._lease.job_id,
                step,
                type(error).__name__,
            )
            return _warning(f"Checkpoint at step {step} was not stored")
        return StoredCheckpoint(step, key, dict(event.get("metrics") or {}))

    def _record_checkpoint(self, session: Session, job: Job, stored: StoredCheckpoint) -> None:
        known = session.scalar(
            select(Checkpoint).where(
                Checkpoint.job_id == job.id, Checkpoint.step_number == stored.step
            )
        )
        organization = session.get_one(Organization, job.organization_id)
        metrics = {"step": stored.step} | _numbers(stored.metrics)
        row = add_checkpoint(
            session,
            job.id,
            name=checkpoint_name(job.model, organization.name, job.suffix, stored.step),
            step_number=stored.step,
            metrics=metrics,
            location=stored.location,
        )
        if known is None:
            append_event(
                session,
                job.id,
                "info",
                f"Checkpoint created at step {stored.step} with Snapshot ID: {row.name}",
            )


def _warning(message: str) -> Message:
    return {"event": "message", "level": "warn", "message": message, "data": None}


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: metrics[name] for name in EVENT_METRICS if metrics.get(name) is not None}


def _measured(event: Message) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ("event", "total_steps")}


def _known_steps(session: Session, job_id: str, metrics: list[Message]) -> set[int]:
    steps = [int(event["step"]) for event in metrics]
    return set(
        session.scalars(select(Metric.step).where(Metric.job_id == job_id, Metric.step.in_(steps)))
    )


def _record(session: Session, job: Job, event: Message, known: set[int]) -> None:
    match event["event"]:
        case "stage":
            _stage(job, str(event.get("stage")))
        case "message":
            level = event.get("level")
            append_event(
                session,
                job.id,
                level if level in _LEVELS else "info",
                str(event.get("message")),
                data=event.get("data"),
            )
        case "validated":
            _validated(session, job, event)
        case "metrics":
            _metrics(session, job, event, known)


def _stage(job: Job, stage: str) -> None:
    # What the owner asked for stays on display until the process has left.
    if job.stage not in ("pausing", "cancelling") and stage in STAGES[job.status]:
        move(job, job.status, stage=stage)


def _validated(session: Session, job: Job, event: Message) -> None:
    """Numbers in place of "auto", the report, and the way over queued to running."""
    numbers = dict(event.get("hyperparameters") or {})
    job.hyperparameters = numbers
    kind = str(job.method.get("type", "supervised"))
    block = dict(job.method.get(kind) or {})
    job.method = {**job.method, kind: {**block, "hyperparameters": numbers}}
    job.data_report = event.get("report")
    job.estimate = event.get("estimate")
    if job.status != VALIDATING_FILES:
        return
    asked = job.stage if job.stage in ("pausing", "cancelling") else None
    move(job, QUEUED)
    append_event(session, job.id, "info", "Files validated, moving job to queued state")
    move(job, RUNNING, stage=asked or "validating")
    append_event(session, job.id, "info", "Fine-tuning job started")


def _metrics(session: Session, job: Job, event: Message, known: set[int]) -> None:
    step, total = int(event["step"]), event.get("total_steps")
    # A resumed attempt repeats the steps since its checkpoint; their events are there already.
    if step in known:
        return
    loss = event.get("train_loss")
    words = "not finite" if loss is None else f"{loss:.4f}"
    append_event(
        session,
        job.id,
        "info",
        f"Step {step}/{total}: training loss={words}",
        type="metrics",
        data={"step": step, "total_steps": total} | _numbers(event),
    )
