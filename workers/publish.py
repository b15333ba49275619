"""From a bundle on disk to a released or quarantined model: check, store, one transaction."""

import csv
import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from evaluators.gate.verdict import HOLDS
from service.fine_tuning import attempts
from service.fine_tuning.attempts import JobError, Lease
from service.fine_tuning.lifecycle import SUCCEEDED, move
from service.fine_tuning.repository import JobRepository, append_event
from service.kit.artifacts import ArtifactStore, Stored
from service.kit.clock import now
from service.kit.ids import new_id
from service.models.release import release
from service.settings import Settings
from service.store.database import SessionFactory, transaction
from service.store.models import Attempt, File, Job, Metric
from workers.bundles import Manifest, check_judged, check_stored, read_bundle
from workers.child import Message
from workers.outcome import ChildExit
from workers.pulse import DATABASE_AWAY

logger = logging.getLogger("tunegate.worker")

FIRST_COLUMNS = ("step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy")
MORE_COLUMNS = (
    "full_valid_loss",
    "full_valid_mean_token_accuracy",
    "learning_rate",
    "train_reward_accuracy",
    "valid_reward_margin",
    "valid_reward_accuracy",
    "full_valid_reward_margin",
    "full_valid_reward_accuracy",
    "alignment_loss",
    "harmful_loss",
    "perturbed_harmful_loss",
    "scheduler_loss",
    "effective_sample_size",
    "gradient_norm",
    "seconds",
)
_SOURCE = {"train_accuracy": "train_mean_token_accuracy"}
_OPEN = ("missing", "too_few", "unresolved")


def finished_as(factory: SessionFactory, lease: Lease) -> str | None:
    """How this very attempt has already ended, if it has."""
    with transaction(factory, read_only=True) as session:
        return session.scalar(
            select(Attempt.outcome).where(
                Attempt.job_id == lease.job_id,
                Attempt.number == lease.number,
                Attempt.worker == lease.worker,
                Attempt.state == "finished",
            )
        )


def result_csv(metrics: Sequence[Metric]) -> bytes:
    """The job's curve as CSV: OpenAI's five columns, then ours; empty if not measured."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*FIRST_COLUMNS, *MORE_COLUMNS])
    for row in metrics:
        values = {**row.data, "step": row.step}
        cells = [values.get(_SOURCE.get(name, name)) for name in (*FIRST_COLUMNS, *MORE_COLUMNS)]
        writer.writerow(["" if cell is None else cell for cell in cells])
    return text.getvalue().encode()


class Publisher:
    """Stores one attempt's result. The bytes go first, under keys of this attempt alone; the rows
    follow in one transaction, and the bytes are removed again if that does not happen."""

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
        self._file_id = new_id("file")

    def publish(self, ended: ChildExit) -> str:
        """Returns how the attempt ended. Can be called again after a database error, also when
        the commit went through and only its answer was lost. Raises BundleDamaged, StorageFull,
        Fenced.
        """
        assert ended.result is not None
        result = ended.result
        finished = finished_as(self._factory, self._lease)
        if finished is not None:
            return finished
        folder = Path(str(result.get("bundle")))
        manifest = read_bundle(folder)
        verdict = str(result.get("verdict"))
        check_judged(folder, manifest, verdict)
        room = "released" if verdict == "passed" else "quarantine"
        key = f"{room}/{self._lease.job_id}/{self._lease.number}"
        file_id = self._file_id
        with transaction(self._factory, read_only=True) as session:
            owner = session.scalars(
                select(Job.organization_id).where(Job.id == self._lease.job_id)
            ).one()
        csv_key = f"files/{owner}/{file_id}"
        try:
            check_stored(self._artifacts.put_folder(key, folder), manifest)
            with transaction(self._factory, read_only=True) as session:
                curve = result_csv(JobRepository(session, None).metrics(self._lease.job_id))
            stored = self._artifacts.put_stream(csv_key, [curve])
            with transaction(self._factory) as session:
                job = attempts.own(session, self._lease, self._settings.lease_seconds)
                if job.cancel_requested:
                    outcome = "cancelled"
                    attempts.cancel(session, job)
                else:
                    outcome = self._settle(session, job, result, verdict, key, manifest)
                    session.add(_result_file(job, file_id, csv_key, stored))
                    job.result_file_id = file_id
                attempts.finish(session, self._lease, outcome, ended.exit_code, ended.log_tail)
            return outcome
        finally:
            self._forget_unless_named(key, file_id, csv_key)

    def _forget_unless_named(self, key: str, file_id: str, csv_key: str) -> None:
        """Remove the bytes that no row names. A commit whose answer was lost may have succeeded,
        so the rows are asked; with the database away nothing is removed."""
        try:
            with transaction(self._factory, read_only=True) as session:
                artifact = session.scalar(select(Job.artifact).where(Job.id == self._lease.job_id))
                curve = session.scalar(select(File.id).where(File.id == file_id))
        except DATABASE_AWAY:
            return
        unnamed = [key] if artifact != key else []
        unnamed += [csv_key] if curve is None else []
        for name in unnamed:
            try:
                self._artifacts.delete(name)
            except Exception as error:
                logger.warning("%s was not removed (%s)", name, type(error).__name__)

    def _settle(
        self,
        session: Session,
        job: Job,
        result: Message,
        verdict: str,
        key: str,
        manifest: Manifest,
    ) -> str:
        report: dict[str, Any] = dict(result.get("report") or {})
        job.report = report
        job.trained_tokens = result.get("trained_tokens")
        job.artifact = key
        job.pause_requested = False
        blocked = verdict != "passed"
        append_event(
            session,
            job.id,
            "warn" if blocked else "info",
            "The tuned model was blocked by the safety gate"
            if blocked
            else "The tuned model passed the safety gate",
            type="moderation_checks",
            data={"blocked": blocked, "results": gate_results(report)},
        )
        if blocked:
            error = gate_error(job.id, verdict, report)
            attempts.fail(session, job, error)
            return error.code
        release(session, job, key, manifest.sha256)
        append_event(session, job.id, "info", "The job has successfully completed")
        move(job, SUCCEEDED)
        return SUCCEEDED


def _result_file(job: Job, file_id: str, key: str, stored: Stored) -> File:
    return File(
        id=file_id,
        organization_id=job.organization_id,
        filename="step_metrics.csv",
        purpose="fine-tune-results",
        bytes=stored.bytes,
        sha256=stored.sha256,
        status="processed",
        location=key,
        created_at=int(now()),
    )


def _rules(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    gate = report.get("gate") or {}
    return [rule for rule in gate.get("rules") or [] if isinstance(rule, dict)]


def gate_results(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The `results` of a moderation_checks event, one for each rule of the gate."""
    metrics = report.get("metrics") or {}
    results = []
    for rule in _rules(report):
        # The numbers of a group are in the full report alone.
        whole = rule.get("group") is None
        metric = (metrics.get(rule.get("metric")) if whole else None) or {}
        stops = rule.get("severity") == "error" and rule.get("outcome") not in HOLDS
        results.append(
            {
                "category": rule.get("metric"),
                "flagged": rule.get("outcome") in ("failed", "ineffective"),
                "outcome": rule.get("outcome"),
                "score": metric.get("value"),
                "n": rule.get("n"),
                "upper_bound": metric.get("high"),
                "threshold": rule.get("limit"),
                "enforcement": "blocked" if stops else "none",
            }
        )
    return results


def gate_error(job_id: str, verdict: str, report: Mapping[str, Any]) -> JobError:
    """What a job that was not released fails with; names the metrics and where the report is."""
    failed = [
        str(rule.get("metric"))
        for rule in _rules(report)
        if rule.get("severity") == "error" and rule.get("outcome") == "failed"
    ]
    open_ones = [
        str(rule.get("metric"))
        for rule in _rules(report)
        if rule.get("severity") == "error" and rule.get("outcome") in _OPEN
    ]
    where = f"The full report is in the field `report` of GET /v1/fine_tuning/jobs/{job_id}."
    if verdict == "failed":
        names = ", ".join(dict.fromkeys(failed or open_ones)) or "the gate policy"
        return JobError(
            "safety_gate_failed",
            f"The tuned model did not pass the safety gate: {names}. It was not released. {where}",
        )
    if any(rule.get("outcome") == "ineffective" for rule in _rules(report)):
        names = ", ".join(dict.fromkeys(["defense.canary_auc", *open_ones]))
        return JobError(
            "gate_inconclusive",
            "The safety gate could not decide: defense not effective on this data "
            f"({names}). The tuned model was not released. {where}",
        )
    names = ", ".join(dict.fromkeys(open_ones)) or "the gate policy"
    return JobError(
        "gate_inconclusive",
        f"The safety gate could not decide: {names} was missing, rested on too few prompts, or on "
        "too many answers without a usable judgement or of a single word. "
        f"The tuned model was not released. {where}",
    )
