"""Decisions about files: who sees one, when it may go, how its content is answered."""

from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import quote

from sqlalchemy.orm import Session

from service.files import repository
from service.files.repository import FileRepository
from service.fine_tuning.repository import JobRepository
from service.kit.artifacts import CHUNK_BYTES, ArtifactMissing, ArtifactStore
from service.kit.clock import now
from service.kit.errors import ApiError
from service.kit.gateway import Gateway
from service.store.models import File


class Content(NamedTuple):
    """A file's bytes and the headers that describe them."""

    chunks: Iterator[bytes]
    media_type: str
    headers: dict[str, str]


def find(session: Session, organization_id: str, file_id: str, *, lock: bool = False) -> File:
    """The file. Raises ApiError 404, the same for one that belongs to somebody else."""
    file = FileRepository(session, organization_id).get(file_id, lock=lock)
    if file is None:
        raise ApiError(404, f"No such File object: {file_id}", "file_not_found", "id")
    return file


def mark_deleted(session: Session, organization_id: str, file_id: str) -> File:
    """Hide the file; its content goes after the commit. Raises ApiError 400 `file_in_use`."""
    file = find(session, organization_id, file_id, lock=True)
    if JobRepository(session, organization_id).uses_file(file_id):
        raise ApiError(
            400,
            f"File {file_id} is used by a job that has not finished. Cancel the job or wait.",
            "file_in_use",
            "id",
        )
    file.deleted_at = int(now())
    return file


def content(artifacts: ArtifactStore, *, key: str, name: str, size: int, sha256: str) -> Content:
    """An artifact as an answer. Raises ApiError 404 if the store has lost it."""
    try:
        handle = artifacts.open(key)
    except ArtifactMissing as error:
        raise ApiError(404, "The content of this file is gone.", "file_not_found", "id") from error

    def chunks() -> Iterator[bytes]:
        with handle:
            while chunk := handle.read(CHUNK_BYTES):
                yield chunk

    media_type = "text/csv" if name.endswith(".csv") else "application/octet-stream"
    return Content(
        chunks(),
        media_type,
        {
            "content-length": str(size),
            "content-disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
            "etag": f'"{sha256}"',
        },
    )


def remove_expired(gateway: Gateway) -> int:
    """Delete files whose time is over, unless an unfinished job needs them; returns how many."""
    removed: list[str] = []
    with gateway.writing() as session:
        for file in repository.expired(session):
            if not JobRepository(session, file.organization_id).uses_file(file.id):
                file.deleted_at = int(now())
                removed.append(file.location)
    for key in removed:
        gateway.discard(key)
    return len(removed)
