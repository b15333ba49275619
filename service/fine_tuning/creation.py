"""Creating a job: every check that needs no tokenizer, then all rows in one transaction."""

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

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
from jobspec.privacy import PrivacyOptions, unsuited
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
from service.gates.service import effective_policy
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


class Sending(NamedTuple):
    """A request's Idempotency-Key and the hash of its body. earlier: the job that it made before,
    if this is a repetition."""

    key: str | None
    digest: str
    earlier: Job | None


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
    jobs = JobRepository(session, caller.organization_id)
    sent = sending(session, jobs, caller, body, headers)
    if sent.earlier is not None:
        return sent.earlier
    method = _method(request)
    if request.integrations:
        raise ApiError(
            400,
            "This server has no integrations yet. Leave 'integrations' out.",
            "unsupported_parameter",
            "integrations",
        )
    hyperparameters = _hyperparameters(request, method)
    base_model, parent_model = _base_and_parent(session, gateway, caller, request.model)
    _check_privacy_policy(gateway, request.privacy)
    defense = _defense(gateway, request.defense, method)
    entry = gateway.catalogue.find(base_model)
    if problem := unsuited(request.privacy, method, defense, entry):
        raise invalid_value(f"{problem.message}.", problem.param)
    policy = _policy(session, gateway, caller, request)
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
        model=base_model,
        parent_model=parent_model,
        request=_request(request.privacy),
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
        request_digest=sent.digest,
        idempotency_key=sent.key,
        api_key_id=caller.key_id,
        created_at=int(now()),
    )
    jobs.add(job)
    append_event(session, job.id, "info", f"Created fine-tuning job: {job.id}")
    return job


def sending(
    session: Session, jobs: JobRepository, caller: Caller, body: bytes, headers: Mapping[str, str]
) -> Sending:
    """How a request that creates a job is told apart from others, and what an equal one made.

    Raises ApiError for an Idempotency-Key that is too long, or was used with another body.
    """
    key = headers.get("idempotency-key")
    if key is not None and not 1 <= len(key) <= MAX_IDEMPOTENCY_KEY:
        raise invalid_value(
            f"The Idempotency-Key header has 1 to {MAX_IDEMPOTENCY_KEY} characters.", None
        )
    digest = hashlib.sha256(body).hexdigest()
    return Sending(key, digest, _sent_before(session, jobs, caller, key, digest, headers))


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


def _base_and_parent(
    session: Session, gateway: Gateway, caller: Caller, name: str
) -> tuple[str, str | None]:
    """The base model, and the released model that the job continues from where it names one."""
    if gateway.catalogue.find(name) is not None:
        return name, None
    parent = ModelRepository(session, caller.organization_id).get(name)
    if parent is None:
        raise ApiError(
            404,
            f"The model '{name}' does not exist or you do not have access to it.",
            "model_not_found",
            "model",
        )
    if gateway.catalogue.find(parent.base_model) is None:
        raise invalid_value(
            f"{name} cannot be tuned further: its base model {parent.base_model} is no longer "
            "offered. Name one of the base models: "
            f"{', '.join(entry.name for entry in gateway.catalogue.offered)}.",
            "model",
        )
    return parent.base_model, parent.id


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


def _check_privacy_policy(gateway: Gateway, privacy: PrivacyOptions | None) -> None:
    """Before the options are looked at: they cannot be made to fit both."""
    if privacy is not None and gateway.settings.require_defense:
        raise _violation(
            "every job must be defended by the data scheduler, which weighs rows by what they say "
            "and so cannot run with privacy; leave 'privacy' out, or ask your operator to set "
            "require_defense to false",
            "privacy",
        )


def _request(privacy: PrivacyOptions | None) -> dict[str, Any] | None:
    return None if privacy is None else {"privacy": privacy.model_dump(mode="json")}


def _violation(what: str, param: str) -> ApiError:
    return ApiError(400, f"Your organisation's policy: {what}.", "policy_violation", param)


def _policy(session: Session, gateway: Gateway, caller: Caller, request: JobRequest) -> Policy:
    policy = effective_policy(session, gateway.policy, caller.organization_id)
    if request.gate is None or not request.gate.rules:
        return policy
    try:
        return tighten(policy, request.gate.rules)
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
