"""Streaming multipart/form-data: small fields in memory, the one file straight to its sink."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from service.kit.errors import ApiError

MAX_FIELDS = 16
MAX_FIELD_BYTES = 4096
# What boundaries, part headers and fields may add to the file's own size.
MAX_OVERHEAD_BYTES = 256 * 1024
FLUSH_BYTES = 1024 * 1024

Sink = Callable[[bytes], Awaitable[None]]


class Form(NamedTuple):
    """Fields by name, and the name that the client gave its file (None: no file was sent)."""

    fields: dict[str, str]
    filename: str | None
    file_bytes: int


def file_too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The file is larger than {limit:,} bytes, the most that this server takes.",
        "file_too_large",
        "file",
        headers={"connection": "close"},
    )


async def receive_form(request: Request, sink: Sink, *, file_field: str, max_bytes: int) -> Form:
    """Read the request's form; the bytes of `file_field` go to `sink` in pieces.

    Fields may come before or after the file. Raises ApiError 400 for a malformed form and 413 for
    a file over `max_bytes` (before reading, where the length is declared); ClientDisconnect when
    the client goes away.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes + MAX_OVERHEAD_BYTES:
        raise file_too_large(max_bytes)
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise _malformed("Send the request as multipart/form-data.")
    reader = _Reader(file_field, max_bytes)
    received = 0
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        async for chunk in request.stream():
            received += len(chunk)
            if received > max_bytes + MAX_OVERHEAD_BYTES:
                raise file_too_large(max_bytes)
            if chunk:
                parser.write(chunk)
            if len(reader.pending) >= FLUSH_BYTES:
                await sink(reader.take())
    except FormParserError as error:
        raise _malformed("The multipart body is malformed.") from error
    if not reader.complete:
        raise _malformed("The upload ended early. Send it again.")
    if reader.pending:
        await sink(reader.take())
    fields: dict[str, str] = {}
    for name, value in reader.fields.items():
        try:
            fields[name] = value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _malformed("A form field is not UTF-8 text.") from error
    return Form(fields, reader.filename, reader.file_bytes)


def _malformed(message: str) -> ApiError:
    return ApiError(400, message, "invalid_value", headers={"connection": "close"})


class _Reader:
    """The parser's callbacks: one part at a time, with every size bounded."""

    def __init__(self, file_field: str, max_bytes: int) -> None:
        self.fields: dict[str, bytes] = {}
        self.filename: str | None = None
        self.file_bytes = 0
        self.pending = bytearray()
        self.complete = False
        self._file_field = file_field
        self._max_bytes = max_bytes
        self._parts = 0
        self._name = ""
        self._in_file = False
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._disposition = b""

    def callbacks(self) -> dict[str, Callable[..., None]]:
        return {
            "on_part_begin": self._part_begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_text,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._part_data,
            "on_end": self._end,
        }

    def take(self) -> bytes:
        """The file's bytes that came since the last call."""
        taken = bytes(self.pending)
        self.pending.clear()
        return taken

    def _part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_FIELDS:
            raise _malformed(f"The form has more than {MAX_FIELDS} parts.")
        self._disposition = b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _header_text(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._in_file = self._name == self._file_field
        if not self._name:
            raise _malformed("A part of the form has no name.")
        if self._name in self.fields or (self._in_file and self.filename is not None):
            raise _malformed("A part of the form is there twice.")
        if self._in_file:
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")
        else:
            self.fields[self._name] = b""

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self.file_bytes += end - start
            if self.file_bytes > self._max_bytes:
                raise file_too_large(self._max_bytes)
            self.pending += data[start:end]
            return
        self.fields[self._name] += data[start:end]
        if len(self.fields[self._name]) > MAX_FIELD_BYTES:
            raise _malformed(f"A form field is longer than {MAX_FIELD_BYTES} bytes.")

    def _end(self) -> None:
        self.complete = True
