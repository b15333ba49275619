"""HTTP of calibration and of homogeneity.

The homogeneity route lies below /v1/models, whose other routes take whole paths: this router must
be included before theirs.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool

from service.evaluations import service
from service.evaluations.schemas import CalibrationObject, CalibrationRequest, HomogeneityObject
from service.kit.bodies import parse_body, read_body
from service.kit.gateway import GatewayDep
from service.organizations.authentication import CallerDep

router = APIRouter(tags=["evaluations"])

CALIBRATION_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": CalibrationRequest.model_json_schema()}},
    }
}
# 2,000 items of 25 ratings and two answers of some thousand characters.
MAX_BODY_BYTES = 16 * 1024 * 1024


@router.post("/v1/evaluations/calibration", openapi_extra=CALIBRATION_BODY)
async def calibrate(request: Request, caller: CallerDep) -> CalibrationObject:
    """Compare a judge's or reward model's scores with several raters an item. Keeps nothing."""
    caller.require("models.read")
    asked = parse_body(CalibrationRequest, await read_body(request, MAX_BODY_BYTES))
    with service.turn():
        return await run_in_threadpool(service.calibration, asked)


@router.get("/v1/models/homogeneity")
def homogeneity(
    gateway: GatewayDep,
    caller: CallerDep,
    models: Annotated[list[str] | None, Query(max_length=100)] = None,
    pairs: Annotated[int, Query(ge=0, le=100)] = 10,
    refusals: bool = True,
) -> HomogeneityObject:
    """How alike the organisation's released models answer open questions.

    `models` may be repeated; without it the 25 newest are compared.
    """
    caller.require("models.read")
    with gateway.reading() as session:
        rows, left_out = service.chosen_models(session, gateway.catalogue, caller, models or [])
    with service.turn():
        return service.compare(gateway.artifacts, rows, left_out, pairs=pairs, refusals=refusals)
