"""HTTP of models. Names have slashes and colons, so the routes take whole paths."""

from urllib.parse import quote

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from service.files.service import content
from service.kit.gateway import GatewayDep
from service.models import service
from service.models.schemas import ModelDeleted, ModelFiles, ModelList, ModelObject
from service.organizations.authentication import CallerDep

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("")
def index(gateway: GatewayDep, caller: CallerDep) -> ModelList:
    """List base models and the organisation's released models."""
    caller.require("models.read")
    with gateway.reading() as session:
        return ModelList(data=service.visible(session, gateway.catalogue, caller))


@router.get("/{model:path}/files")
def files(model: str, gateway: GatewayDep, caller: CallerDep) -> ModelFiles:
    """List the files of a released model."""
    caller.require("models.read")
    with gateway.reading() as session:
        row = service.find_released(session, caller, model)
    return ModelFiles(data=service.bundle(gateway.artifacts, row))


@router.get("/{model:path}/files/{path:path}", response_class=StreamingResponse)
def file(model: str, path: str, gateway: GatewayDep, caller: CallerDep) -> StreamingResponse:
    """Download one file of a released model."""
    caller.require("models.read")
    with gateway.reading() as session:
        row = service.find_released(session, caller, model)
    found = service.bundle_file(gateway.artifacts, row, path)
    answer = content(
        gateway.artifacts,
        key=found.key,
        name=path.rpartition("/")[2],
        size=found.bytes,
        sha256=f"{row.manifest_sha256}:{quote(path)}",
    )
    return StreamingResponse(answer.chunks, media_type=answer.media_type, headers=answer.headers)


@router.get("/{model:path}")
def retrieve(model: str, gateway: GatewayDep, caller: CallerDep) -> ModelObject:
    """Show one model."""
    caller.require("models.read")
    with gateway.reading() as session:
        return service.find(session, gateway.catalogue, caller, model)


@router.delete("/{model:path}")
def delete(model: str, gateway: GatewayDep, caller: CallerDep) -> ModelDeleted:
    """Withdraw a released model and remove its bundle."""
    caller.require("models.delete")
    with gateway.writing() as session:
        location = service.mark_deleted(session, gateway.catalogue, caller, model).location
    gateway.discard(location)
    return ModelDeleted(id=model)
