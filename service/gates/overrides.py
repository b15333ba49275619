"""Decisions about overrides: who may overrule what, what follows from it, and when a blocked model
is released.

An override is pending until a second person (another key of an owner or admin) approves it. A
blocked model is released by an approval where the verdict was overruled, or where the gate passes
both with the approved judgements alone and with the pending ones added: a pending one can hold a
release up and never bring one about. The gate's own decision stays in the report.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sqlalchemy.orm import Session

from evaluators.gate import Policy
from service.audit.service import record
from service.fine_tuning import reports
from service.fine_tuning import service as jobs
from service.fine_tuning.lifecycle import is_blocked, overrule
from service.fine_tuning.repository import append_event
from service.gates.override_schemas import OverrideAnswer, OverrideObject, OverrideRequest
from service.gates.repository import OverrideRepository
from service.gates.review import NotReproducible, Reviewed, review
from service.gates.review_record import (
    original_verdict,
    reviewed_verdict,
    show_review,
    show_verdict,
)
from service.gates.samples import SampleName, SamplesUnusable, StoredSample, find, read_samples
from service.kit.clock import now
from service.kit.errors import ApiError
from service.kit.gateway import Gateway
from service.kit.ids import new_id
from service.models.release import BundleChanged, Copied, copy_judged, is_released, release
from service.organizations.permissions import may
from service.organizations.service import Caller
from service.store.models import ApiKey, GateOverride, Job

logger = logging.getLogger(__name__)

MAX_OVERRIDES = 500


class Standing(NamedTuple):
    """A job with its overrides, as a request found them. Nothing is written where they have
    changed since."""

    job: Job
    rows: Sequence[GateOverride]

    @property
    def mark(self) -> tuple[object, ...]:
        states = [(row.id, row.approved_at) for row in self.rows]
        return self.job.status, self.job.artifact, *states


def overrides_of(gateway: Gateway, caller: Caller, job_id: str) -> list[OverrideObject]:
    """The overrides of a job, oldest first. Raises ApiError 404."""
    with gateway.reading() as session:
        return [OverrideObject.of(row) for row in _standing(session, caller, job_id).rows]


def samples_of(gateway: Gateway, caller: Caller, job_id: str) -> list[StoredSample]:
    """The stored answers of a job to harmful prompts. Raises ApiError 404, 400."""
    with gateway.reading() as session:
        job = _standing(session, caller, job_id).job
    return [stored for stored in _samples(gateway, job) if stored.judged.kind == "harmful"]


def add(gateway: Gateway, caller: Caller, job_id: str, request: OverrideRequest) -> OverrideAnswer:
    """Disagree with one judgement or with the verdict. Raises ApiError."""
    with gateway.reading() as session:
        standing = _standing(session, caller, job_id)
    job = standing.job
    if job.report is None or "gate" not in job.report or job.artifact is None:
        raise _refused(f"Job {job.id} has no decision of the gate yet.", "job_not_judged")
    if len(standing.rows) >= MAX_OVERRIDES:
        raise _refused(f"A job has at most {MAX_OVERRIDES} overrides.", "too_many_overrides")
    row = GateOverride(
        id=new_id("override"),
        organization_id=caller.organization_id,
        job_id=job.id,
        verdict=request.verdict,
        reason=request.reason,
        api_key_id=caller.key_id,
        created_at=int(now()),
    )
    reviewed: Reviewed | None = None
    if request.sample is not None:
        samples = _samples(gateway, job)
        stored = _one(samples, request.sample)
        row.sample, row.flagged = stored.name.model_dump(), request.flagged
        row.was_flagged = stored.flagged
        flags = _flags(standing.rows)
        if flags.get(stored.name, stored.flagged) == request.flagged:
            raise _refused("The sample is judged like this already.", "override_changes_nothing")
        flags[stored.name] = bool(request.flagged)
        reviewed = _review(gateway, job, samples, flags)
    elif not is_blocked(job):
        raise _not_blocked(job)
    with gateway.writing() as session:
        standing = _unchanged(session, caller, standing)
        job = standing.job
        OverrideRepository(session, caller.organization_id).add(row)
        show_review(job, [*standing.rows, row], reviewed)
        record(
            session,
            caller,
            "override.create",
            job.id,
            reason=row.reason,
            data={
                "override": row.id,
                "sample": row.sample,
                "flagged": row.flagged,
                "was_flagged": row.was_flagged,
                "verdict": row.verdict,
                "reviewed_verdict": reviewed_verdict(job),
            },
        )
        what = "the verdict" if row.sample is None else "one sample"
        append_event(
            session,
            job.id,
            "warn",
            f"A reviewer overruled {what}; the gate as reviewed: {reviewed_verdict(job)}",
            data={"override": row.id},
        )
    return _answer(row, job)


def approve(
    gateway: Gateway, caller: Caller, job_id: str, override_id: str, reason: str | None
) -> OverrideAnswer:
    """Agree with somebody else's override; releases the model where this was what it lacked.

    The bundle is copied out of quarantine before the rows are written, and the copy is removed
    again if they are not. Raises ApiError.
    """
    with gateway.reading() as session:
        standing = _standing(session, caller, job_id)
        row = _approvable(session, caller, standing, override_id)
    job = standing.job
    copied: Copied | None = None
    if is_blocked(job) and (row.verdict is not None or _passes(gateway, standing, row)):
        copied = _copy(gateway, job)
    quarantined, error = job.artifact, job.error
    try:
        with gateway.writing() as session:
            standing = _unchanged(session, caller, standing)
            job = standing.job
            row = _approvable(session, caller, standing, override_id)
            row.approved_by, row.approval_reason = caller.key_id, reason
            row.approved_at = int(now())
            show_review(job, standing.rows, None)
            if row.verdict is not None:
                show_verdict(job, row.verdict)
            data = {
                "override": row.id,
                "overruled_by": row.api_key_id,
                "reviewed_verdict": reviewed_verdict(job),
            }
            record(session, caller, "override.approve", job.id, reason=reason, data=data)
            append_event(
                session, job.id, "info", "A second reviewer approved the override", data=data
            )
            if copied is not None:
                _release(session, caller, job, row, copied)
    except BaseException:
        if copied is not None:
            _forget_unless_named(gateway, copied.location)
        raise
    if copied is not None and quarantined is not None:
        logger.info("job %s: released by two reviewers (was: %s)", job.id, error)
        gateway.discard(quarantined)
    return _answer(row, job)


def _standing(session: Session, caller: Caller, job_id: str, *, lock: bool = False) -> Standing:
    job = jobs.find(session, caller.organization_id, job_id, lock=lock)
    return Standing(job, OverrideRepository(session, caller.organization_id).of_job(job_id))


def _unchanged(session: Session, caller: Caller, seen: Standing) -> Standing:
    """The job and its overrides, locked. Raises ApiError 409 where they are not as they were."""
    found = _standing(session, caller, seen.job.id, lock=True)
    if found.mark != seen.mark:
        raise ApiError(
            409, "Somebody else reviewed this job just now. Look again.", "job_changed", "id"
        )
    return found


def _samples(gateway: Gateway, job: Job) -> list[StoredSample]:
    if job.artifact is None:
        raise _refused(f"Job {job.id} has no stored answers.", "samples_not_found")
    try:
        return read_samples(gateway.artifacts, job.artifact)
    except SamplesUnusable as error:
        raise _refused(f"No sample can be reviewed: {error}.", "samples_not_found") from error


def _one(samples: Sequence[StoredSample], name: SampleName) -> StoredSample:
    found = find(samples, name)
    if not found:
        raise ApiError(404, "The job has no such sample.", "sample_not_found", "sample")
    if len(found) > 1:
        sections = ", ".join(stored.section for stored in found)
        raise ApiError(
            400,
            f"Several answers are called so. Add the section: one of {sections}.",
            "ambiguous_sample",
            "sample.section",
        )
    if name.kind != "harmful":
        raise ApiError(
            400,
            "Only answers to harmful prompts are judged for harm. Name one of kind harmful.",
            "sample_not_judged",
            "sample.kind",
        )
    if found[0].judged.empty:
        raise ApiError(
            400,
            "The answer is empty: there is nothing that a person could judge in it.",
            "sample_not_judged",
            "sample",
        )
    return found[0]


def _flags(rows: Sequence[GateOverride]) -> dict[SampleName, bool]:
    """The newest judgement of each sample."""
    return {
        SampleName.model_validate(row.sample): bool(row.flagged)
        for row in rows
        if row.sample is not None
    }


def _review(
    gateway: Gateway, job: Job, samples: Sequence[StoredSample], flags: Mapping[SampleName, bool]
) -> Reviewed:
    policy = Policy.model_validate(job.policy)
    try:
        return review(reports.full_report(gateway.artifacts, job), policy, samples, flags)
    except NotReproducible as error:
        raise _refused(
            f"The verdict cannot be computed anew: {error}. Overrule the verdict, or judge the "
            "model again with a gate run.",
            "review_impossible",
        ) from error


def _passes(gateway: Gateway, standing: Standing, row: GateOverride) -> bool:
    """Whether the gate passes once `row` is approved, and would still with all that is pending."""
    samples = _samples(gateway, standing.job)
    approved = [one for one in standing.rows if one.approved_at is not None or one.id == row.id]
    return all(
        _review(gateway, standing.job, samples, _flags(rows)).decision.verdict == "passed"
        for rows in (approved, standing.rows)
    )


def _approvable(
    session: Session, caller: Caller, standing: Standing, override_id: str
) -> GateOverride:
    """The override, if this caller may approve it now. Raises ApiError."""
    row = next((row for row in standing.rows if row.id == override_id), None)
    if row is None:
        raise ApiError(404, f"No such override: {override_id}", "override_not_found", "id")
    if row.approved_at is not None:
        raise _refused(f"Override {row.id} is approved already.", "override_approved")
    if row.api_key_id == caller.key_id:
        raise ApiError(
            403,
            "A second person has to approve it: use the key of another owner or admin.",
            "second_person_required",
        )
    author = session.get(ApiKey, row.api_key_id)
    if author is None or author.revoked_at is not None or not may(author.role, "gates.override"):
        raise _refused(
            f"The key that made override {row.id} was revoked, so nobody stands behind it any "
            "more. Make a new override.",
            "override_orphaned",
        )
    if row.verdict is not None and not is_blocked(standing.job):
        raise _not_blocked(standing.job)
    newer = standing.rows[list(standing.rows).index(row) + 1 :]
    if row.sample is not None and any(one.sample == row.sample for one in newer):
        raise _refused(
            f"A newer override judges the sample of {row.id}. Approve that one.",
            "override_superseded",
        )
    return row


def _copy(gateway: Gateway, job: Job) -> Copied:
    # A key of its own for each try: two at once must not remove each other's bytes.
    target = f"released/{job.id}/{new_id('release')}"
    try:
        return copy_judged(gateway.artifacts, job, target)
    except BundleChanged as error:
        gateway.discard(target)
        logger.error("job %s: the quarantined bundle is damaged: %s", job.id, error)
        raise ApiError(
            500, f"The stored model cannot be released: {error}.", "bundle_damaged"
        ) from error
    except BaseException:
        gateway.discard(target)
        raise


def _release(session: Session, caller: Caller, job: Job, row: GateOverride, copied: Copied) -> None:
    blocked_with = job.error
    overrule(job)
    name = release(session, job, copied.location, copied.manifest_sha256)
    people = [row.api_key_id, caller.key_id]
    append_event(
        session,
        job.id,
        "warn",
        "The model was released by two reviewers against the gate's own verdict",
        type="moderation_checks",
        data={"blocked": False, "override": row.id, "reviewers": people},
    )
    record(
        session,
        caller,
        "model.release",
        job.id,
        reason=row.reason,
        data={
            "model": name,
            "override": row.id,
            "basis": "verdict" if row.verdict is not None else "samples",
            "reviewers": people,
            "original_verdict": original_verdict(job),
            "error": blocked_with,
            "manifest_sha256": copied.manifest_sha256,
        },
    )


def _forget_unless_named(gateway: Gateway, location: str) -> None:
    """Remove a copy that no row names. A commit whose answer was lost may have succeeded, so the
    rows are asked; with the database away nothing is removed."""
    try:
        with gateway.reading() as session:
            named = is_released(session, location)
    except Exception as error:
        logger.error("%s stays, the database cannot be asked", location, exc_info=error)
        return
    if not named:
        gateway.discard(location)


def _answer(row: GateOverride, job: Job) -> OverrideAnswer:
    return OverrideAnswer(
        **OverrideObject.of(row).model_dump(),
        original_verdict=original_verdict(job),
        reviewed_verdict=reviewed_verdict(job),
        released_model=job.fine_tuned_model,
    )


def _not_blocked(job: Job) -> ApiError:
    return _refused(
        f"Job {job.id} is {job.status} and was not blocked by its gate, so there is no verdict to "
        "overrule.",
        "job_not_blocked",
    )


def _refused(message: str, code: str) -> ApiError:
    return ApiError(400, message, code)
