"""Liveness and readiness, without authentication."""

import logging
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from sqlalchemy.exc import SQLAlchemyError

from service.kit.gateway import Gateway, GatewayDep
from service.store.database import SchemaOutdated, check_schema

logger = logging.getLogger(__name__)

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process is alive."""
    return {"status": "ok"}


@router.get("/readyz", response_model=None)
def readyz(gateway: GatewayDep) -> JSONResponse:
    """Whether requests can be served: database, schema, artifact store. 503 tells what is not."""
    problems = [*_database(gateway), *_artifacts(gateway)]
    body: dict[str, Any] = {"status": "unavailable" if problems else "ok", "reasons": problems}
    return JSONResponse(body, 503 if problems else 200, {"retry-after": "1"} if problems else None)


def _database(gateway: Gateway) -> list[str]:
    try:
        with gateway.reading() as session:
            check_schema(session)
    except SchemaOutdated as error:
        return [str(error)]
    except SQLAlchemyError as error:
        logger.error("readiness: the database cannot be used", exc_info=error)
        return ["the database cannot be used"]
    return []


def _artifacts(gateway: Gateway) -> list[str]:
    if gateway.artifact_probe.writable():
        return []
    return ["the artifact store cannot be written"]
