"""HTTP of files."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from service.files import service
from service.files.repository import FileRepository
from service.files.schemas import FileDeleted, FileList, FileObject
from service.files.upload import receive_upload
from service.kit.gateway import GatewayDep
from service.kit.pagination import paginate
from service.organizations.authentication import CallerDep
from service.store.models import File

router = APIRouter(prefix="/v1/files", tags=["files"])

UPLOAD_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["fine-tune", "evals"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": 3600,
                            "maximum": 2592000,
                        },
                    },
                }
            }
        },
    }
}


@router.post("", openapi_extra=UPLOAD_FORM)
async def create(request: Request, gateway: GatewayDep, caller: CallerDep) -> FileObject:
    """Upload a file."""
    caller.require("files.write")
    return await receive_upload(request, gateway, caller)


@router.get("")
def index(
    gateway: GatewayDep,
    caller: CallerDep,
    purpose: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> FileList:
    """List files."""
    caller.require("files.read")
    with gateway.reading() as session:
        files = FileRepository(session, caller.organization_id)
        page = paginate(
            session,
            files.filtered(purpose),
            File,
            after=after,
            limit=limit,
            newest_first=order == "desc",
            cursors=files.owned(),
        )
        data = [FileObject.of(row) for row in page.data]
    return FileList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=page.has_more,
    )


@router.get("/{file_id}")
def retrieve(file_id: str, gateway: GatewayDep, caller: CallerDep) -> FileObject:
    """Show one file."""
    caller.require("files.read")
    with gateway.reading() as session:
        return FileObject.of(service.find(session, caller.organization_id, file_id))


@router.delete("/{file_id}")
def delete(file_id: str, gateway: GatewayDep, caller: CallerDep) -> FileDeleted:
    """Delete a file that no unfinished job needs."""
    caller.require("files.write")
    with gateway.writing() as session:
        location = service.mark_deleted(session, caller.organization_id, file_id).location
    gateway.discard(location)
    return FileDeleted(id=file_id)


@router.get("/{file_id}/content", response_class=StreamingResponse)
def content(file_id: str, gateway: GatewayDep, caller: CallerDep) -> StreamingResponse:
    """The bytes of a file."""
    caller.require("files.read")
    with gateway.reading() as session:
        file = service.find(session, caller.organization_id, file_id)
    found = service.content(
        gateway.artifacts,
        key=file.location,
        name=file.filename,
        size=file.bytes,
        sha256=file.sha256,
    )
    return StreamingResponse(found.chunks, media_type=found.media_type, headers=found.headers)
