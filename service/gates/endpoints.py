"""HTTP of gate policies."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool

from service.gates import service
from service.gates.repository import PolicyRepository
from service.gates.schemas import PolicyList, PolicyObject, PolicyRequest
from service.kit.bodies import parse_body, read_body
from service.kit.gateway import GatewayDep
from service.kit.pagination import paginate
from service.organizations.authentication import CallerDep
from service.store.models import GatePolicy

router = APIRouter(prefix="/v1/gates/policies", tags=["gates"])

POLICY_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": f"#/components/schemas/{PolicyRequest.__name__}"}
            }
        },
    }
}


@router.post("", openapi_extra=POLICY_BODY)
async def create(request: Request, gateway: GatewayDep, caller: CallerDep) -> PolicyObject:
    """Set the organisation's gate policy: a new version, for jobs that are created from now on."""
    caller.require("gates.set")
    asked = parse_body(PolicyRequest, await read_body(request))

    def write() -> PolicyObject:
        with gateway.writing() as session:
            return service.set_policy(session, gateway.policy, caller, asked)

    return await run_in_threadpool(write)


@router.get("")
def index(
    gateway: GatewayDep,
    caller: CallerDep,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> PolicyList:
    """List the versions of the organisation's policy, newest first."""
    caller.require("gates.read")
    with gateway.reading() as session:
        policies = PolicyRepository(session, caller.organization_id)
        page = paginate(session, policies.readable(), GatePolicy, after=after, limit=limit)
        data = service.describe(gateway.policy, page.data, policies.newest())
    return PolicyList(data=data, has_more=page.has_more)


@router.get("/{policy_id}")
def retrieve(policy_id: str, gateway: GatewayDep, caller: CallerDep) -> PolicyObject:
    """Show one version, the policy in force (`current`), or the operator's (`operator`)."""
    caller.require("gates.read")
    with gateway.reading() as session:
        return service.show(session, gateway.policy, caller.organization_id, policy_id)


@router.delete("/{policy_id}")
def delete(policy_id: str, gateway: GatewayDep, caller: CallerDep) -> PolicyObject:
    """Withdraw the policy in force; the operator's holds again. The versions stay as a record."""
    caller.require("gates.set")
    with gateway.writing() as session:
        return service.withdraw(session, gateway.policy, caller, policy_id)
