"""Receiving one upload: the body goes straight into the artifact store and is checked there."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from jobspec.findings import MAX_FINDINGS, FileReport, Finding
from jobspec.formats import FileFormat, check_training_file, detect_format
from service.files.repository import FileRepository
from service.files.schemas import INPUT_PURPOSES, FileObject
from service.kit.artifacts import ArtifactWriter
from service.kit.clock import now
from service.kit.errors import ApiError, invalid_value
from service.kit.gateway import Gateway
from service.kit.ids import new_id
from service.kit.multipart import Form, receive_form
from service.organizations.service import Caller
from service.store.models import File

MAX_FILENAME = 255
EXPIRY_SECONDS = (3600, 2_592_000)


@dataclass(frozen=True)
class UploadForm:
    """The fields of an upload, checked."""

    filename: str
    purpose: str
    expires_after: int | None

    @classmethod
    def of(cls, form: Form) -> "UploadForm":
        """Raises ApiError 400 that names the field."""
        if form.filename is None:
            raise ApiError(
                400, "Missing required parameter: 'file'.", "missing_required_parameter", "file"
            )
        purpose = form.fields.get("purpose")
        if purpose is None:
            raise ApiError(
                400,
                "Missing required parameter: 'purpose'.",
                "missing_required_parameter",
                "purpose",
            )
        if purpose not in INPUT_PURPOSES:
            raise invalid_value(
                f"Invalid value for 'purpose'. Use one of: {', '.join(INPUT_PURPOSES)}.", "purpose"
            )
        known = {"purpose", "expires_after[anchor]", "expires_after[seconds]"}
        for name in sorted(set(form.fields) - known):
            raise ApiError(400, f"Unknown parameter: '{name}'.", "unknown_parameter", name)
        filename = _plain_name(form.filename)
        if purpose == "fine-tune" and not filename.lower().endswith(".jsonl"):
            raise invalid_value("A file with purpose fine-tune must be named *.jsonl.", "file")
        return cls(filename, purpose, _expires_after(form.fields))


def _plain_name(filename: str) -> str:
    """The last part of the client's path, without control characters, of bounded length."""
    name = PurePosixPath(filename.replace("\\", "/")).name
    name = "".join(char for char in name if char.isprintable())
    return name[-MAX_FILENAME:] or "file"


def _expires_after(fields: Mapping[str, str]) -> int | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise invalid_value("'expires_after[anchor]' must be created_at.", "expires_after[anchor]")
    low, high = EXPIRY_SECONDS
    if seconds is None or not seconds.isascii() or not seconds.isdigit():
        raise invalid_value(
            "'expires_after[seconds]' must be a whole number.", "expires_after[seconds]"
        )
    if len(seconds) > 9 or not low <= int(seconds) <= high:
        raise invalid_value(
            f"'expires_after[seconds]' must be from {low} to {high}.", "expires_after[seconds]"
        )
    return int(seconds)


async def receive_upload(request: Request, gateway: Gateway, caller: Caller) -> FileObject:
    """Store the upload of `request`.

    The caller is known before the first byte is read. Whatever goes wrong on the way, also the
    client going away, nothing of the upload remains.
    """
    file_id = new_id("file")
    key = f"files/{caller.organization_id}/{file_id}"
    writer = await run_in_threadpool(gateway.artifacts.writer, key)

    async def sink(chunk: bytes) -> None:
        await run_in_threadpool(writer.write, chunk)

    try:
        form = await receive_form(
            request, sink, file_field="file", max_bytes=gateway.settings.max_file_bytes
        )
        return await run_in_threadpool(
            _finish, gateway, caller, writer, UploadForm.of(form), file_id, key
        )
    except BaseException:
        # Not awaited: a cancelled task could not, and removing a draft takes no time.
        writer.abort()
        raise


def _finish(
    gateway: Gateway,
    caller: Caller,
    writer: ArtifactWriter,
    form: UploadForm,
    file_id: str,
    key: str,
) -> FileObject:
    """Check the draft, publish it, write its row."""
    writer.close()
    report, file_format = None, None
    if form.purpose == "fine-tune":
        report, file_format = _check(writer, gateway.settings.max_line_bytes)
        if report.fatal:
            raise fatal_error(report)
    stored = writer.commit()
    moment = int(now())
    failed = report is not None and report.error_count > 0
    row = File(
        id=file_id,
        organization_id=caller.organization_id,
        filename=form.filename,
        purpose=form.purpose,
        bytes=stored.bytes,
        sha256=stored.sha256,
        status="error" if failed else "processed",
        status_details=report.summary() if failed and report is not None else None,
        format=file_format,
        rows=None if report is None else report.rows,
        findings=[] if report is None else findings_of(report),
        location=key,
        created_at=moment,
        expires_at=None if form.expires_after is None else moment + form.expires_after,
    )
    try:
        with gateway.writing() as session:
            FileRepository(session, caller.organization_id).add(row)
    except BaseException:
        gateway.artifacts.delete(key)
        raise
    return FileObject.of(row)


def _check(writer: ArtifactWriter, max_line_bytes: int) -> tuple[FileReport, FileFormat | None]:
    """What is wrong with the draft, and its format; rows of no known format are read as chat."""
    with writer.draft() as stream:
        found = detect_format(cast(BinaryIO, stream), max_line_bytes=max_line_bytes)
    with writer.draft() as stream:
        report = check_training_file(
            cast(BinaryIO, stream), found or "chat", max_line_bytes=max_line_bytes
        )
    return report, found


def findings_of(report: FileReport) -> list[dict[str, Any]]:
    """The report's findings as JSON, errors first."""
    return [_as_json(finding) for finding in (*report.errors, *report.warnings)][:MAX_FINDINGS]


def fatal_error(report: FileReport) -> ApiError:
    """The 400 for a file that is no JSON Lines text at all."""
    return ApiError(
        400,
        f"The file cannot be used. {report.summary(1)}",
        "invalid_value",
        "file",
        details=[_as_json(finding) for finding in report.errors[:MAX_FINDINGS]],
    )


def _as_json(finding: Finding) -> dict[str, Any]:
    return dict(finding._asdict())
