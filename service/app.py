"""The gateway as an ASGI application: `uvicorn service.app:create_app --factory`."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

import service.analyses.endpoints
import service.audit.endpoints
import service.evaluations.endpoints
import service.files.endpoints
import service.fine_tuning.endpoints
import service.fine_tuning.report_endpoints
import service.gates.endpoints
import service.gates.override_endpoints
import service.gates.runs_endpoints
import service.models.endpoints
import service.moderations.endpoints
from service.analyses.schemas import AnalysisRequest
from service.files.service import remove_expired
from service.fine_tuning.requests import JobRequest
from service.gates.override_schemas import ApprovalRequest, OverrideRequest
from service.gates.runs_schemas import RunRequest
from service.gates.schemas import PolicyRequest
from service.kit import handlers, health
from service.kit.gateway import Gateway
from service.kit.middleware import RequestContext
from service.moderations.schemas import ModerationRequest
from service.settings import Settings

logger = logging.getLogger(__name__)

TIDY_SECONDS = 600.0
STALE_DRAFT_SECONDS = 86_400.0
SCHEMAS = "#/components/schemas/"
OWN_BODIES = (
    JobRequest,
    RunRequest,
    PolicyRequest,
    OverrideRequest,
    ApprovalRequest,
    ModerationRequest,
    AnalysisRequest,
)


class GatewayApp(FastAPI):
    """FastAPI whose document also describes the bodies that endpoints parse themselves."""

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        schemas = document["components"]["schemas"]
        for body in OWN_BODIES:
            schema = body.model_json_schema(ref_template=SCHEMAS + "{model}")
            schemas.update(schema.pop("$defs", {}))
            schemas[body.__name__] = schema
        return document


def create_app(settings: Settings | None = None) -> FastAPI:
    """The gateway for `settings`, by default those of the environment.

    Raises CatalogueError, PolicyError or OSError for a configuration that cannot be used.
    """
    gateway = Gateway(settings or Settings.load())
    app = GatewayApp(
        title="tunegate",
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        lifespan=_lifespan,
    )
    app.state.gateway = gateway
    app.add_middleware(RequestContext)
    handlers.install(app)
    app.include_router(health.router)
    app.include_router(service.files.endpoints.router)
    app.include_router(service.fine_tuning.endpoints.router)
    app.include_router(service.fine_tuning.report_endpoints.router)
    # Before the models, whose last route takes any name.
    app.include_router(service.evaluations.endpoints.router)
    app.include_router(service.models.endpoints.router)
    app.include_router(service.gates.endpoints.router)
    app.include_router(service.gates.override_endpoints.router)
    app.include_router(service.gates.runs_endpoints.router)
    app.include_router(service.analyses.endpoints.router)
    app.include_router(service.moderations.endpoints.router)
    app.include_router(service.audit.endpoints.router)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    gateway: Gateway = app.state.gateway
    tidying = asyncio.create_task(_tidy(gateway))
    try:
        with gateway.closing():
            yield
    finally:
        tidying.cancel()
        with suppress(asyncio.CancelledError):
            await tidying


async def _tidy(gateway: Gateway) -> None:
    """Now and then remove files whose time is over and drafts of uploads that a crash cut off. A
    failure waits for the next round."""
    while True:
        await asyncio.sleep(TIDY_SECONDS)
        try:
            await run_in_threadpool(remove_expired, gateway)
            await run_in_threadpool(gateway.artifacts.remove_stale_drafts, STALE_DRAFT_SECONDS)
        except Exception as error:
            logger.error("tidying: %s", type(error).__name__, exc_info=error)
