"""Rows of a prompt file, whether JSON Lines or CSV, each with the line it begins on."""

import csv
import hashlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jobspec.findings import FileReport, Findings, shown
from jobspec.json_lines import DEFAULT_MAX_LINE_BYTES, json_objects

MAX_FILE_BYTES = 64 << 20


class SuiteFileError(ValueError):
    """A prompt file that cannot be used. `report` has every fault with its line and field."""

    def __init__(self, name: str, report: FileReport) -> None:
        super().__init__(f"{name}: {report.summary()}")
        self.report = report


class FileRow(NamedTuple):
    """One row; `fields` is None where the row has a fault."""

    line: int
    fields: Mapping[str, Any] | None


class PromptFile(NamedTuple):
    """Rows and hash of a file. Faults of single rows are in the findings it was read with."""

    rows: tuple[FileRow, ...]
    sha256: str


def read_prompt_file(path: Path, findings: Findings) -> PromptFile:
    """Read a file whole. What does not begin with a brace is CSV with a header line.

    Faults go into `findings`; raises SuiteFileError for a file that is not there or larger than
    64 MiB.
    """
    data = _bytes(path, findings)
    lines = data.removeprefix(b"\xef\xbb\xbf").lstrip()
    if lines.startswith(b"{"):
        rows = tuple(
            FileRow(line.number, line.value if line.sound else None)
            for line in json_objects(io.BytesIO(data), findings, DEFAULT_MAX_LINE_BYTES)
        )
    else:
        rows = tuple(_csv_rows(data, findings))
    return PromptFile(rows=rows, sha256=hashlib.sha256(data).hexdigest())


def _bytes(path: Path, findings: Findings) -> bytes:
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        findings.add(
            "error", "unreadable", None, None,
            f"The file cannot be read ({error.strerror}). Check path and permissions.", fatal=True,
        )  # fmt: skip
        raise SuiteFileError(path.name, findings.report(0)) from error
    if len(data) > MAX_FILE_BYTES:
        findings.add(
            "error", "file_too_large", None, None,
            f"The file is larger than {MAX_FILE_BYTES >> 20} MiB. Split it.", fatal=True,
        )  # fmt: skip
        raise SuiteFileError(path.name, findings.report(0))
    return data


def _csv_rows(data: bytes, findings: Findings) -> Iterator[FileRow]:
    """Rows after the header; a quoted field may run over several lines."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        findings.add(
            "error", "not_utf8", data.count(b"\n", 0, error.start) + 1, None,
            "Not UTF-8. Save the file as UTF-8 text.", fatal=True,
        )  # fmt: skip
        return
    if "\x00" in text:
        findings.add(
            "error", "nul_byte", text.count("\n", 0, text.index("\x00")) + 1, None,
            "The text has a NUL character. Save the file as UTF-8 text.", fatal=True,
        )  # fmt: skip
        return
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            findings.add(
                "error", "not_csv", line, None,
                f"Not valid CSV: {error}. Quote fields that hold commas, quotes or line ends.",
                fatal=True,
            )  # fmt: skip
            return
        if not values:
            continue
        if header is None:
            header = [value.strip() for value in values]
            if len(set(header)) != len(header):
                findings.add(
                    "error", "duplicate_column", line, None, "Two columns have one name.",
                    fatal=True,
                )  # fmt: skip
                return
        elif len(values) != len(header):
            findings.add(
                "error", "wrong_field_count", line, None,
                f"The row has {len(values)} fields and the header {len(header)}. Quote fields "
                "that hold commas.",
            )  # fmt: skip
            yield FileRow(line, None)
        else:
            yield FileRow(line, dict(zip(header, values, strict=True)))


def text_of(
    row: FileRow, keys: tuple[str, ...], findings: Findings, max_characters: int
) -> str | None:
    """The first of the fields that the row has, stripped; None, with a finding, where there is no
    usable text."""
    assert row.fields is not None
    key = next((key for key in keys if key in row.fields), None)
    if key is None:
        findings.add(
            "error", "missing_prompt", row.line, None,
            f"There is no field {' or '.join(keys)}. Give the prompt there.",
        )  # fmt: skip
        return None
    value = row.fields[key]
    if not isinstance(value, str) or not value.strip():
        findings.add(
            "error", "invalid_prompt", row.line, shown(key), "The prompt must be a text, not empty."
        )
        return None
    text = value.strip()
    if len(text) > max_characters:
        findings.add(
            "error", "prompt_too_long", row.line, shown(key),
            f"The prompt has {len(text):,} characters; at most {max_characters:,} are allowed.",
        )  # fmt: skip
        return None
    return text
