"""The dependency that every endpoint below /v1 has: who is calling."""

from contextlib import suppress
from typing import Annotated

from fastapi import Depends, Request
from sqlalchemy.exc import SQLAlchemyError

from service.kit.clock import now
from service.kit.errors import ApiError
from service.kit.gateway import GatewayDep
from service.organizations.service import LAST_USED_SECONDS, Caller, identify, touch


def authenticate(request: Request, gateway: GatewayDep) -> Caller:
    """The caller behind the Authorization header.

    Raises ApiError 401 with one message for a key that is missing, malformed, unknown or revoked.
    """
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    caller = None
    if scheme.lower() == "bearer":
        with gateway.reading() as session:
            caller = identify(session, gateway.pepper, key.strip())
    if caller is None:
        raise ApiError(
            401,
            "No valid API key was sent. Send one as `Authorization: Bearer sk-tg-...`; an "
            "operator makes them with `tunegate keys create`.",
            "invalid_api_key",
            headers={"www-authenticate": "Bearer", "connection": "close"},
        )
    if caller.last_used_at is None or now() - caller.last_used_at >= LAST_USED_SECONDS:
        # Only a note: a request that reads must not fail because nothing can be written now.
        with suppress(SQLAlchemyError), gateway.writing() as session:
            touch(session, caller.key_id)
    request.state.organization_id = caller.organization_id
    return caller


CallerDep = Annotated[Caller, Depends(authenticate)]
