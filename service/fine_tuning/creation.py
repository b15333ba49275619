"""Creating a job: every check that needs no tokenizer, then all rows in one transaction."""

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from evaluators.gate import Policy, tighten
from jobspec.defense import (
    CanaryOptions,
    DefenseOptions,
    DefenseRequest,
    PerturbationOptions,
    SchedulerOptions,
)
from jobspec.formats import format_of, wrong_format
from jobspec.hyperparameters import Hyperparameters, Method
from jobspec.spec import mismatch
from service.files.repository import FileRepository
from service.fine_tuning.lifecycle import VALIDATING_FILES
from service.fine_tuning.repository import JobRepository, append_event
from service.fine_tuning.requests import (
    MAX_SEED,
    DpoHyperparametersRequest,
    HyperparametersRequest,
    JobRequest,
)
from service.kit.clock import now
from service.kit.errors import ApiError, invalid_value
from service.kit.gateway import Gateway
from service.kit.ids import new_id
from service.models.repository import ModelRepository
from service.organizations.service import Caller
from service.store.models import ApiKey, File, Job

RETRY_SECONDS = 120
IDEMPOTENCY_SECONDS = 86_400
MAX_IDEMPOTENCY_KEY = 255
# Any other value of these may make the scheduler stand still, or let the user's rows outweigh the
# alignment set; transform, form and the neural form's scorer are free choices.
SET_BY_POLICY = (
    *("sampler", "learning_rate", "initial_logit", "betas", "eps", "clip"),
    *("entropy_coefficient", "gaussian_coefficient", "coefficients", "scorer_learning_rate"),
    *("rescore", "rescore_temperature", "sgld_step"),
)


def create(
    session: Session,
    gateway: Gateway,
    caller: Caller,
    request: JobRequest,
    body: bytes,
    headers: Mapping[str, str],
) -> Job:
    """The job for `request`: a new one, or the one that an earlier sending of it made.

    Job, attempt, wake-up and first event are written in the caller's transaction. Raises ApiError.
    """
    key = headers.get("idempotency-key")
    if key is not None and not 1 <= len(key) <= MAX_IDEMPOTENCY_KEY:
        raise invalid_value(
            f"The Idempotency-Key header has 1 to {MAX_IDEMPOTENCY_KEY} characters.", None
        )
    jobs = JobRepository(session, caller.organization_id)
    digest = hashlib.sha256(body).hexdigest()
    earlier = _sent_before(session, jobs, caller, key, digest, headers)
    if earlier is not None:
        return earlier
    method = _method(request)
    if request.integrations:
        raise ApiError(
            400,
            "This server has no integrations yet. Leave 'integrations' out.",
            "unsupported_parameter",
            "integrations",
        )
    hyperparameters = _hyperparameters(request, method)
    _check_model(session, gateway, caller, request.model)
    defense = _defense(gateway, request.defense, method)
    policy = _policy(gateway, request)
    files = FileRepository(session, caller.organization_id)
    training = _usable_file(files, request.training_file, "training_file", method)
    if request.validation_file is not None:
        if request.validation_file == training.id:
            raise invalid_value(
                "The validation file must not be the training file.", "validation_file"
            )
        _usable_file(files, request.validation_file, "validation_file", method)
    job = Job(
        id=new_id("ftjob"),
        organization_id=caller.organization_id,
        status=VALIDATING_FILES,
        stage="queued",
        model=request.model,
        training_file_id=training.id,
        validation_file_id=request.validation_file,
        suffix=request.suffix,
        seed=secrets.randbelow(MAX_SEED + 1) if request.seed is None else request.seed,
        method={"type": method},
        hyperparameters=hyperparameters.model_dump(mode="json"),
        labels=request.metadata,
        defense=defense.model_dump(mode="json"),
        gate_request=None if request.gate is None else request.gate.model_dump(mode="json"),
        policy=policy.model_dump(mode="json"),
        attempt=1,
        failures=0,
        cancel_requested=False,
        pause_requested=False,
        request_digest=digest,
        idempotency_key=key,
        api_key_id=caller.key_id,
        created_at=int(now()),
    )
    jobs.add(job)
    append_event(session, job.id, "info", f"Created fine-tuning job: {job.id}")
    return job


def _sent_before(
    session: Session,
    jobs: JobRepository,
    caller: Caller,
    key: str | None,
    digest: str,
    headers: Mapping[str, str],
) -> Job | None:
    """The job of an earlier sending: same Idempotency-Key, or a retry of the same body.

    OpenAI's client repeats a POST whose answer was lost and sends no key of its own; it does
    count its retries in a header.
    """
    retries = headers.get("x-stainless-retry-count", "0")
    retried = retries.isdigit() and int(retries) > 0
    # Two sendings at once: the second waits here until the first has committed its job. The first
    # must hold the row too, and nothing tells it apart from a sending that is never repeated.
    session.execute(select(ApiKey.id).where(ApiKey.id == caller.key_id).with_for_update())
    if key is None and not retried:
        return None
    if key is not None:
        found = jobs.recent(caller.key_id, now() - IDEMPOTENCY_SECONDS, key=key)
        if found is not None and found.request_digest != digest:
            raise ApiError(
                409,
                "This Idempotency-Key was used with another request body. Use a new key.",
                "idempotency_key_reused",
            )
        return found
    return jobs.recent(caller.key_id, now() - RETRY_SECONDS, digest=digest)


def _method(request: JobRequest) -> Method:
    method = "supervised" if request.method is None else request.method.type
    if method == "reinforcement":
        raise ApiError(
            400,
            f"The method {method} is not supported by this server. Use supervised or dpo.",
            "method_not_supported",
            "method.type",
        )
    return method


def _hyperparameters(request: JobRequest, method: Method) -> Hyperparameters:
    old = request.hyperparameters
    if method == "dpo":
        if old is not None:
            raise invalid_value(
                "'hyperparameters' belongs to the method supervised. Put them into "
                "'method.dpo.hyperparameters'.",
                "hyperparameters",
            )
        dpo = None if request.method is None else request.method.dpo
        return ((dpo and dpo.hyperparameters) or DpoHyperparametersRequest()).asked()
    block = None if request.method is None else request.method.supervised
    new = None if block is None else block.hyperparameters
    if old is not None and new is not None and old != new:
        raise invalid_value(
            "'hyperparameters' and 'method.supervised.hyperparameters' differ. Give one of them.",
            "hyperparameters",
        )
    return (new or old or HyperparametersRequest()).asked()


def _check_model(session: Session, gateway: Gateway, caller: Caller, name: str) -> None:
    if gateway.catalogue.find(name) is not None:
        return
    if ModelRepository(session, caller.organization_id).get(name) is not None:
        raise invalid_value(
            f"{name} is a fine-tuned model; tuning one further is not supported yet. Name one of "
            f"the base models: {', '.join(entry.name for entry in gateway.catalogue.offered)}.",
            "model",
        )
    raise ApiError(
        404,
        f"The model '{name}' does not exist or you do not have access to it.",
        "model_not_found",
        "model",
    )


def _defense(gateway: Gateway, request: DefenseRequest | None, method: Method) -> DefenseOptions:
    defense = (request or DefenseRequest()).resolve()
    if problem := mismatch(method, defense):
        raise invalid_value(f"Choose another scheduler: {problem}.", "defense.scheduler")
    scorer = getattr(defense.scheduler, "scorer_model", None)
    if scorer is not None and gateway.catalogue.find(scorer) is None:
        raise invalid_value(
            f"There is no model {scorer}. Name one of the base models, or leave it out.",
            "defense.scheduler.scorer_model",
        )
    if not gateway.settings.require_defense:
        return defense
    scheduler, least = defense.scheduler, SchedulerOptions()
    if not isinstance(scheduler, SchedulerOptions):
        raise _violation(
            f"the data scheduler must be bds, {scheduler.name} may not take its place",
            "defense.scheduler",
        )
    for name in SET_BY_POLICY:
        if getattr(scheduler, name) != getattr(least, name):
            raise _violation(
                f"{name} must keep its default ({getattr(least, name)})",
                f"defense.scheduler.{name}",
            )
    for name in ("alignment_coefficient", "alignment_rows"):
        if getattr(scheduler, name) < getattr(least, name):
            raise _violation(
                f"{name} must be at least {getattr(least, name)}", f"defense.scheduler.{name}"
            )
    joint = defense.perturbation
    if isinstance(joint, PerturbationOptions) and joint.mode == "joint":
        for name in ("strength", "clamp", "on_clamp"):
            if getattr(joint, name) != getattr(PerturbationOptions(), name):
                raise _violation(f"{name} must keep its default", f"defense.perturbation.{name}")
    if defense.canaries.count < CanaryOptions().count:
        raise _violation(
            f"count must be at least {CanaryOptions().count}", "defense.canaries.count"
        )
    return defense


def _violation(what: str, param: str) -> ApiError:
    return ApiError(400, f"Your organisation's policy: {what}.", "policy_violation", param)


def _policy(gateway: Gateway, request: JobRequest) -> Policy:
    if request.gate is None or not request.gate.rules:
        return gateway.policy
    try:
        return tighten(gateway.policy, request.gate.rules)
    except ValidationError as error:
        raise invalid_value(
            "The organisation's rules and these are more than a policy can hold.", "gate.rules"
        ) from error


def _usable_file(files: FileRepository, file_id: str, param: str, method: Method) -> File:
    """The file, held until the job is written, so that a deletion cannot slip in between."""
    file = files.get(file_id, lock=True)
    if file is None:
        raise invalid_value(f"There is no file {file_id}. Upload one first.", param)
    if file.purpose != "fine-tune":
        raise invalid_value(
            f"File {file_id} has purpose {file.purpose}; upload it with purpose fine-tune.", param
        )
    if file.format is not None and file.format != format_of(method):
        raise ApiError(
            400,
            f"File {file_id} cannot be used. {wrong_format(file.format, method)}",
            f"invalid_{param}",
            param,
        )
    errors: list[dict[str, Any]] = [
        finding for finding in file.findings or [] if finding["severity"] == "error"
    ]
    if errors:
        few = all(finding["code"] == "invalid_n_examples" for finding in errors)
        raise ApiError(
            400,
            f"File {file_id} cannot be used. {file.status_details}",
            "invalid_n_examples" if few else f"invalid_{param}",
            param,
            details=errors,
        )
    return file
