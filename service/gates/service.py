"""Decisions about gate policies: which one holds, and who may set which.

The operator's policy is the floor: an organisation's own may demand more and never less, whoever
sets it. A floor that was raised later counts at once, since what an older policy lacks is added.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from sqlalchemy.orm import Session

from evaluators.gate import Policy, PolicyError, parse_policy, policy_sha256
from evaluators.gate.floor import raised_to, weaker_than
from service.audit.service import record
from service.gates.repository import PolicyRepository
from service.gates.schemas import CURRENT, OPERATOR, PolicyObject, PolicyRequest
from service.kit.bodies import validation_error
from service.kit.clock import now
from service.kit.errors import ApiError
from service.kit.ids import new_id
from service.organizations.service import Caller
from service.store.models import GatePolicy

MAX_LISTED = 100


def effective_policy(session: Session, floor: Policy, organization_id: str) -> Policy:
    """What a job that is created now must hold: the organisation's policy, never below `floor`.

    Raises ApiError 400 `policy_outdated` where the two do not fit into one policy.
    """
    row = PolicyRepository(session, organization_id).newest()
    if row is None or row.policy is None:
        return floor
    try:
        return raised_to(Policy.model_validate(row.policy), floor)
    except PolicyError as error:
        raise ApiError(
            400,
            f"Your organisation's gate policy (version {row.version}) is older than the operator's "
            f"rules: {error}. An owner or admin has to set it anew.",
            "policy_outdated",
        ) from error


def set_policy(
    session: Session, floor: Policy, caller: Caller, request: PolicyRequest
) -> PolicyObject:
    """Add a version, which holds from now on. Raises ApiError 400 for a policy that is not one, or
    that is weaker than the floor."""
    policy = _parse(request.policy)
    weaker = weaker_than(policy, floor)
    if weaker:
        raise ApiError(
            400,
            "The policy is weaker than the operator's, which nobody in an organisation can lower: "
            f"{_listed(weaker)}. GET /v1/gates/policies/{OPERATOR} shows what it must hold.",
            "policy_below_floor",
            "policy",
            details=[{"message": sentence} for sentence in weaker[:MAX_LISTED]],
        )
    repository = PolicyRepository(session, caller.organization_id)
    before = repository.newest(lock=True)
    row = _next_version(caller, before, policy, request.description)
    repository.add(row)
    earlier = floor if before is None or before.policy is None else _stored(before)
    record(
        session,
        caller,
        "gate_policy.set",
        row.id,
        reason=request.description,
        data={
            "version": row.version,
            "policy_sha256": row.policy_sha256,
            "replaces": None if before is None else before.id,
            "loosened": weaker_than(policy, earlier),
        },
    )
    return PolicyObject.of(row, in_force=True, below_floor=[])


def withdraw(session: Session, floor: Policy, caller: Caller, policy_id: str) -> PolicyObject:
    """Add a version without a policy, from which on the operator's holds.

    Raises ApiError 404, and 400 `policy_not_in_force` for any version but the one in force.
    """
    repository = PolicyRepository(session, caller.organization_id)
    before = repository.newest(lock=True)
    if policy_id not in (CURRENT, None if before is None else before.id):
        _find(repository, policy_id)
        raise ApiError(
            400,
            f"Policy {policy_id} is not in force. Versions stay as a record; only the one in "
            "force can be withdrawn.",
            "policy_not_in_force",
            "id",
        )
    if before is None or before.policy is None:
        raise _not_found(policy_id)
    row = _next_version(caller, before, None, None)
    repository.add(row)
    record(
        session,
        caller,
        "gate_policy.withdraw",
        before.id,
        data={"version": row.version, "loosened": weaker_than(floor, _stored(before))},
    )
    return PolicyObject.of(row, in_force=False, below_floor=[])


def show(session: Session, floor: Policy, organization_id: str, policy_id: str) -> PolicyObject:
    """A version by its id, the one in force (`current`) or the operator's (`operator`).

    Raises ApiError 404.
    """
    repository = PolicyRepository(session, organization_id)
    newest = repository.newest()
    own_holds = newest is not None and newest.policy is not None
    if policy_id == OPERATOR or (policy_id == CURRENT and not own_holds):
        return PolicyObject.operators(floor, in_force=not own_holds)
    row = newest if policy_id == CURRENT else _find(repository, policy_id)
    assert row is not None
    return describe(floor, [row], newest)[0]


def describe(
    floor: Policy, rows: Sequence[GatePolicy], newest: GatePolicy | None
) -> list[PolicyObject]:
    """The versions as they are answered; `newest` tells which one is in force."""
    return [
        PolicyObject.of(
            row,
            in_force=newest is not None and row.id == newest.id and row.policy is not None,
            below_floor=[] if row.policy is None else weaker_than(_stored(row), floor),
        )
        for row in rows
    ]


def _parse(given: Any) -> Policy:
    if isinstance(given, str):
        try:
            return parse_policy(given)
        except PolicyError as error:
            raise ApiError(
                400, f"The policy cannot be used: {error}.", "invalid_policy", "policy"
            ) from error
    try:
        return Policy.model_validate(given)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        raise validation_error(
            [{**problem, "loc": ("policy", *problem["loc"])} for problem in problems]
        ) from error


def _next_version(
    caller: Caller, before: GatePolicy | None, policy: Policy | None, description: str | None
) -> GatePolicy:
    return GatePolicy(
        id=new_id("gatepol"),
        organization_id=caller.organization_id,
        version=1 if before is None else before.version + 1,
        policy=None if policy is None else policy.model_dump(mode="json"),
        policy_sha256=None if policy is None else policy_sha256(policy),
        description=description,
        api_key_id=caller.key_id,
        created_at=int(now()),
    )


def _stored(row: GatePolicy) -> Policy:
    return Policy.model_validate(row.policy)


def _find(repository: PolicyRepository, policy_id: str) -> GatePolicy:
    row = repository.get(policy_id)
    if row is None:
        raise _not_found(policy_id)
    return row


def _not_found(policy_id: str) -> ApiError:
    return ApiError(404, f"No such gate policy: {policy_id}", "policy_not_found", "id")


def _listed(sentences: Sequence[str], limit: int = 3) -> str:
    more = len(sentences) - limit
    return "; ".join([*sentences[:limit], *([f"and {more} more"] if more > 0 else [])])
