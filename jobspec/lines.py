"""Reading a file line by line without ever holding more than one bounded line."""

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CHUNK_BYTES = 1 << 16


class Line(NamedTuple):
    """One line without its ending; `content` is None where it was longer than the limit."""

    number: int
    content: bytes | None
    bytes: int


def bounded_lines(stream: BinaryIO, max_line_bytes: int) -> Iterator[Line]:
    """Yield the lines of `stream` (ended by LF or CRLF), dropping a leading byte-order mark.

    A line of more than `max_line_bytes` bytes is counted but not kept.
    """
    number, kept, size, first = 1, bytearray(), 0, True
    while chunk := stream.read(CHUNK_BYTES):
        if first:
            while len(chunk) < 3 and (more := stream.read(3 - len(chunk))):
                chunk += more
            chunk, first = chunk.removeprefix(BYTE_ORDER_MARK), False
        *complete, rest = chunk.split(b"\n")
        for part in complete:
            size += len(part)
            if size <= max_line_bytes + 1:
                kept += part
            yield _line(number, kept, size, max_line_bytes)
            number, kept, size = number + 1, bytearray(), 0
        size += len(rest)
        if size <= max_line_bytes + 1:
            kept += rest
        else:
            kept.clear()
    if size:
        yield _line(number, kept, size, max_line_bytes)


def _line(number: int, kept: bytearray, size: int, max_line_bytes: int) -> Line:
    if size <= max_line_bytes + 1:
        content = bytes(kept).removesuffix(b"\r")
        if len(content) <= max_line_bytes:
            return Line(number, content, size)
    return Line(number, None, size)
