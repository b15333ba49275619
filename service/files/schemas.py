"""Wire types of files, as OpenAI's client expects them."""

from typing import Any, Literal, cast

from pydantic import BaseModel, Field

from jobspec.formats import FileFormat
from service.store.models import File

INPUT_PURPOSES = ("fine-tune", "evals")


class FileObject(BaseModel):
    """A file. The last four fields are ours; `findings` is what the format check found."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["uploaded", "processed", "error"]
    status_details: str | None
    sha256: str = Field(description="hash of the content, hexadecimal")
    format: FileFormat | None = Field(
        description="what a line holds, by the first lines; None where it was not seen"
    )
    rows: int | None = Field(description="lines with an example; None where none were counted")
    findings: list[dict[str, Any]] = Field(description="at most 100, errors first")

    @classmethod
    def of(cls, row: File) -> "FileObject":
        return cls(
            id=row.id,
            bytes=row.bytes,
            created_at=row.created_at,
            expires_at=row.expires_at,
            filename=row.filename,
            purpose=row.purpose,
            status=cast(Literal["uploaded", "processed", "error"], row.status),
            status_details=row.status_details,
            sha256=row.sha256,
            format=row.format,
            rows=row.rows,
            findings=row.findings or [],
        )


class FileList(BaseModel):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True
