"""Decisions about gate runs: which models may be measured, by which policy, and how much.

A run goes through the same queue and workers as a fine-tuning job. It stores a report of its own
and leaves job, model and release as they are.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from evaluators.gate import Policy
from service.audit.service import record
from service.fine_tuning import creation, service
from service.fine_tuning.kinds import GATE_RUN
from service.fine_tuning.lifecycle import QUEUED
from service.fine_tuning.repository import JobRepository, append_event
from service.gates.runs_schemas import EvaluationRequest, RunObject, RunRequest
from service.gates.service import effective_policy, show
from service.kit.clock import now
from service.kit.errors import invalid_value
from service.kit.gateway import Gateway
from service.kit.ids import new_id
from service.models.repository import ModelRepository
from service.models.service import not_found
from service.organizations.service import Caller
from service.store.models import Job, ReleasedModel


class Subject(NamedTuple):
    """A stored model: the job that made it, where its bundle is, and the hash of the manifest
    (None: never released, so that nobody kept it)."""

    job: Job
    location: str
    manifest_sha256: str | None


def create(
    session: Session,
    gateway: Gateway,
    caller: Caller,
    request: RunRequest,
    body: bytes,
    headers: Mapping[str, str],
) -> Job:
    """The run for `request`: a new one, or the one that an earlier sending of it made.

    Raises ApiError: 404 for a model that the caller cannot see, 400 for one without a bundle, a
    policy that is not there, or a larger evaluation than the operator's.
    """
    runs = JobRepository(session, caller.organization_id, GATE_RUN)
    sending = creation.sending(session, runs, caller, body, headers)
    if sending.earlier is not None:
        return sending.earlier
    subject = _subject(session, gateway, caller, request.model)
    source, policy = _policy(session, gateway, caller, request)
    evaluation = _evaluation(gateway, request.evaluation)
    made_by = subject.job
    run = Job(
        id=new_id("gaterun"),
        kind=GATE_RUN,
        organization_id=caller.organization_id,
        status=QUEUED,
        stage="queued",
        model=made_by.model,
        request={
            "model": request.model,
            "source_job_id": made_by.id,
            "location": subject.location,
            "manifest_sha256": subject.manifest_sha256,
            "policy": source,
            "evaluation": evaluation,
        },
        training_file_id=made_by.training_file_id,
        validation_file_id=made_by.validation_file_id,
        seed=made_by.seed,
        method=made_by.method,
        hyperparameters={},
        defense={},
        policy=policy.model_dump(mode="json"),
        attempt=1,
        failures=0,
        cancel_requested=False,
        pause_requested=False,
        request_digest=sending.digest,
        idempotency_key=sending.key,
        api_key_id=caller.key_id,
        created_at=int(now()),
    )
    runs.add(run)
    append_event(session, run.id, "info", f"Created gate run: {run.id}")
    record(
        session,
        caller,
        "gate_run.create",
        run.id,
        data={"model": request.model, "policy": source, "evaluation": evaluation},
    )
    return run


def find(session: Session, organization_id: str, run_id: str) -> Job:
    """The run. Raises ApiError 404, the same for one that belongs to somebody else."""
    return service.find(session, organization_id, run_id, kind=GATE_RUN)


def cancel(session: Session, organization_id: str, run_id: str) -> Job:
    """End a waiting run at once; ask the worker of a running one to let go. Raises ApiError."""
    return service.cancel(session, organization_id, run_id, kind=GATE_RUN)


def describe(session: Session, runs: Sequence[Job]) -> list[RunObject]:
    """The runs as they are answered, with their places in the queue."""
    if not runs:
        return []
    positions = JobRepository(session, None, GATE_RUN).queue_positions(runs)
    return [RunObject.of(run, queue_position=positions.get(run.id)) for run in runs]


def _subject(session: Session, gateway: Gateway, caller: Caller, name: str) -> Subject:
    released = ModelRepository(session, caller.organization_id).get(name)
    jobs = JobRepository(session, caller.organization_id)
    job = jobs.get(name if released is None else released.job_id)
    if job is None:
        raise not_found(name)
    if gateway.catalogue.find(job.model) is None:
        raise invalid_value(
            f"{name} cannot be measured: its base model {job.model} is no longer offered.", "model"
        )
    made = released or session.scalar(select(ReleasedModel).where(ReleasedModel.job_id == job.id))
    if made is not None:
        if made.deleted_at is not None:
            raise not_found(name)
        return Subject(job, made.location, made.manifest_sha256)
    if job.artifact is None:
        raise invalid_value(
            f"Job {name} has left no model that could be measured; it is {job.status}.", "model"
        )
    return Subject(job, job.artifact, None)


def _policy(
    session: Session, gateway: Gateway, caller: Caller, request: RunRequest
) -> tuple[dict[str, Any], Policy]:
    """Where the policy comes from, and the policy."""
    asked = request.policy
    if isinstance(asked, Policy):
        return {"source": "inline", "id": None}, asked
    if asked == "current":
        held = effective_policy(session, gateway.policy, caller.organization_id)
        return {"source": "current", "id": None}, held
    if asked == "operator":
        return {"source": "operator", "id": None}, gateway.policy
    version = show(session, gateway.policy, caller.organization_id, asked)
    if version.policy is None:
        raise invalid_value(
            f"{asked} is the withdrawal of a policy and has no rules; use 'operator'.", "policy"
        )
    return {"source": "version", "id": version.id}, Policy.model_validate(version.policy)


def _evaluation(gateway: Gateway, request: EvaluationRequest) -> dict[str, int]:
    asked, most = request.asked(), gateway.settings.evaluation
    for name, value in asked.items():
        limit = getattr(most, name)
        if limit is not None and value > limit:
            raise invalid_value(
                f"{name} may be at most {limit}, which is what this server measures.",
                f"evaluation.{name}",
            )
    return asked
