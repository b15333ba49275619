"""HTTP of moderations."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.concurrency import run_in_threadpool

from service.kit.bodies import parse_body, read_body
from service.kit.gateway import Gateway
from service.moderations import service
from service.moderations.process import JudgeProcess, start_later
from service.moderations.schemas import ModerationObject, ModerationRequest
from service.organizations.authentication import CallerDep


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    gateway: Gateway = app.state.gateway
    process = start_later(gateway.settings.evaluation.judge, gateway.settings.worker_threads)
    app.state.judge_process = process
    try:
        yield
    finally:
        process.close()


router = APIRouter(prefix="/v1/moderations", tags=["moderations"], lifespan=_lifespan)

MODERATION_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": f"#/components/schemas/{ModerationRequest.__name__}"}
            }
        },
    }
}


def get_judge_process(request: Request) -> JudgeProcess:
    return cast(JudgeProcess, request.app.state.judge_process)


@router.post("", openapi_extra=MODERATION_BODY)
async def create(
    request: Request,
    caller: CallerDep,
    process: Annotated[JudgeProcess, Depends(get_judge_process)],
) -> ModerationObject:
    """Judge texts with the operator's scorer."""
    caller.require("moderations.create")
    asked = parse_body(ModerationRequest, await read_body(request))
    return await run_in_threadpool(service.moderate, process, asked)
