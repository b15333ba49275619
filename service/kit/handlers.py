"""Every error below the gateway becomes OpenAI's error object, in this one place."""

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException

from service.kit.artifacts import StorageFull
from service.kit.bodies import validation_error
from service.kit.errors import ApiError

logger = logging.getLogger(__name__)


def respond(error: ApiError) -> JSONResponse:
    """The answer for `error`."""
    headers = dict(error.headers)
    if error.status in (409, 500):
        # The client would otherwise repeat what cannot end differently.
        headers.setdefault("x-should-retry", "false")
    return JSONResponse(error.body(), error.status, headers)


def internal_error() -> ApiError:
    """The 500 for a fault of ours: no internals, the request id is in the headers."""
    return ApiError(
        500,
        "The server had an error. Quote the x-request-id header when you report it.",
        "internal_error",
    )


def database_away() -> ApiError:
    """The 503 for a database that cannot be used."""
    return ApiError(
        503,
        "The database cannot be used right now. Try again.",
        "service_unavailable",
        headers={"retry-after": "1"},
    )


def install(app: FastAPI) -> None:
    """Replace FastAPI's handlers."""

    @app.exception_handler(ApiError)
    def _api_error(_request: Request, error: ApiError) -> JSONResponse:
        return respond(error)

    @app.exception_handler(RequestValidationError)
    def _invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        return respond(validation_error(error.errors()))

    @app.exception_handler(HTTPException)
    def _http_error(request: Request, error: HTTPException) -> JSONResponse:
        where = f"{request.method} {request.url.path}"
        if error.status_code == 404:
            found = ApiError(404, f"Unknown request URL: {where}.", "unknown_url")
        elif error.status_code == 405:
            found = ApiError(405, f"Not allowed: {where}.", "method_not_allowed")
        elif error.status_code == 413:
            found = ApiError(413, "The request body is too large.", "request_too_large")
        else:
            found = ApiError(error.status_code, str(error.detail))
        found.headers.update(error.headers or {})
        return respond(found)

    @app.exception_handler(StorageFull)
    def _storage_full(_request: Request, error: StorageFull) -> JSONResponse:
        logger.error("artifact store: %s", error)
        return respond(
            ApiError(
                503,
                "The artifact store is full. Ask the operator to free space, then try again.",
                "storage_full",
                headers={"x-should-retry": "false"},
            )
        )

    @app.exception_handler(PoolTimeout)
    @app.exception_handler(OperationalError)
    def _database_down(_request: Request, error: Exception) -> JSONResponse:
        logger.error("database: %s", type(error).__name__, exc_info=error)
        return respond(database_away())
