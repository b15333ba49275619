"""Which of the two training formats a file is in, and which one a method reads."""

from itertools import islice
from pathlib import Path
from typing import BinaryIO, Literal

from jobspec.chat import check_chat_file
from jobspec.findings import MIN_ROWS, FileReport, Findings
from jobspec.hyperparameters import Method
from jobspec.json_lines import DEFAULT_MAX_LINE_BYTES, json_objects
from jobspec.preference import PREFERENCE_KEYS, check_preference_file

FileFormat = Literal["chat", "preference"]

FIRST_ROWS = 10

_CHECKS = {"chat": check_chat_file, "preference": check_preference_file}


def detect_format(
    source: Path | BinaryIO, *, max_line_bytes: int = DEFAULT_MAX_LINE_BYTES
) -> FileFormat | None:
    """The format of the first rows; None where none of the first 10 rows shows one.

    A row with `messages` is a chat example; one with `input`, `preferred_output` or
    `non_preferred_output` is a preference. A stream is left where reading stopped.
    """
    for line in islice(json_objects(source, Findings(), max_line_bytes), FIRST_ROWS):
        keys = set(line.value or ())
        if "messages" in keys:
            return "chat"
        if keys & PREFERENCE_KEYS:
            return "preference"
    return None


def check_training_file(
    source: Path | BinaryIO,
    file_format: FileFormat,
    *,
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES,
    min_rows: int = MIN_ROWS,
) -> FileReport:
    """Check a whole file of this format; never raises for its content."""
    return _CHECKS[file_format](source, max_line_bytes=max_line_bytes, min_rows=min_rows)


def format_of(method: Method) -> FileFormat:
    """The format that a method trains on."""
    return "preference" if method == "dpo" else "chat"


def wrong_format(seen: FileFormat, method: Method) -> str:
    """One sentence for a file whose format does not belong to the method."""
    other: Method = "dpo" if method == "supervised" else "supervised"
    return (
        f"It is in the {seen} format, but the method is {method}, which needs the "
        f"{format_of(method)} format. Choose the method {other}, or another file."
    )
