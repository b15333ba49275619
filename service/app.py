"""The gateway as an ASGI application: `uvicorn service.app:create_app --factory`."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

import service.files.endpoints
import service.fine_tuning.endpoints
import service.models.endpoints
from service.files.service import remove_expired
from service.kit import handlers, health
from service.kit.gateway import Gateway
from service.kit.middleware import RequestContext
from service.settings import Settings

logger = logging.getLogger(__name__)

TIDY_SECONDS = 600.0


def create_app(settings: Settings | None = None) -> FastAPI:
    """The gateway for `settings`, by default those of the environment.

    Raises CatalogueError, PolicyError or OSError for a configuration that cannot be used.
    """
    gateway = Gateway(settings or Settings.load())
    app = FastAPI(
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
    app.include_router(service.models.endpoints.router)
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
    """Now and then remove files whose time is over. A failure waits for the next round."""
    while True:
        await asyncio.sleep(TIDY_SECONDS)
        try:
            await run_in_threadpool(remove_expired, gateway)
        except Exception as error:
            logger.error("expired files: %s", type(error).__name__, exc_info=error)
