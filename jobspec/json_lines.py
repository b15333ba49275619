"""JSON Lines files read strictly: one JSON object a line, and every fault with its line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jobspec.findings import Findings, shown
from jobspec.lines import bounded_lines

MAX_DEPTH = 20
DEFAULT_MAX_LINE_BYTES = 1 << 20


class JsonLine(NamedTuple):
    """A non-blank line: its object, or None where it has none. `sound`: it has no fault so far."""

    number: int
    value: dict[str, Any] | None
    sound: bool


class _DuplicateKey(ValueError):
    pass


def json_objects(
    source: Path | BinaryIO, findings: Findings, max_line_bytes: int
) -> Iterator[JsonLine]:
    """One item a non-blank line. Faults go into `findings`; never raises for a file's content."""
    if isinstance(source, Path):
        with source.open("rb") as stream:
            yield from json_objects(stream, findings, max_line_bytes)
        return
    blank: int | None = None
    for line in bounded_lines(source, max_line_bytes):
        if line.content is not None and not line.content.strip():
            blank = blank or line.number
            continue
        if blank is not None:
            findings.add(
                "error", "blank_line", blank, None,
                "The line is blank. Remove it; only the end of the file may have blank lines.",
            )  # fmt: skip
            blank = None
        before = findings.errors
        value = _object(line.number, line.content, line.bytes, findings, max_line_bytes)
        if value is not None:
            _check_text(value, line.number, "", 1, findings)
        yield JsonLine(line.number, value, findings.errors == before)


def _object(
    number: int, content: bytes | None, size: int, findings: Findings, max_line_bytes: int
) -> dict[str, Any] | None:
    def fatal(code: str, message: str) -> None:
        findings.add("error", code, number, None, message, fatal=True)

    if content is None:
        fatal(
            "line_too_long",
            f"The line has {size:,} bytes; at most {max_line_bytes:,} are allowed. Split the "
            "example into shorter ones.",
        )
        return None
    if b"\x00" in content:
        fatal(
            "nul_byte", f"NUL byte at column {content.index(0) + 1}. Save the file as UTF-8 text."
        )
        return None
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        fatal("not_utf8", f"Not UTF-8 (byte {error.start + 1}). Save the file as UTF-8 text.")
        return None
    try:
        value = json.loads(text, object_pairs_hook=_unique_object, parse_constant=_refuse_constant)
    except _DuplicateKey as error:
        findings.add(
            "error", "duplicate_key", number, shown(str(error)), "The key stands twice. Keep one."
        )
        return None
    except RecursionError:
        fatal("nested_too_deep", f"Nested deeper than {MAX_DEPTH} levels.")
        return None
    except ValueError as error:
        reason = (
            f"{error.msg} at column {error.colno}"
            if isinstance(error, json.JSONDecodeError)
            else str(error)
        )
        fatal("not_json", f"Not valid JSON: {reason}. Write one JSON object on each line.")
        return None
    if not isinstance(value, dict):
        fatal("not_an_object", "Not a JSON object. Write one JSON object on each line.")
        return None
    return value


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKey(next(key for key in keys if keys.count(key) > 1))
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _check_text(value: Any, line: int, path: str, depth: int, findings: Findings) -> None:
    """Depth, and strings that no tokenizer can take (NUL, lone surrogates)."""
    if depth > MAX_DEPTH:
        findings.add(
            "error", "nested_too_deep", line, path, f"Nested deeper than {MAX_DEPTH} levels."
        )
    elif isinstance(value, str):
        _check_characters(value, line, path, findings)
    elif isinstance(value, dict):
        for key, item in value.items():
            inside = f"{path}.{shown(key)}" if path else shown(key)
            _check_characters(key, line, inside, findings)
            _check_text(item, line, inside, depth + 1, findings)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_text(item, line, f"{path}[{index}]", depth + 1, findings)


def _check_characters(text: str, line: int, path: str, findings: Findings) -> None:
    if "\x00" in text:
        findings.add("error", "nul_byte", line, path, "The text has a NUL character. Remove it.")
    elif not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        findings.add(
            "error", "broken_unicode", line, path,
            "The text has half of a surrogate pair, which is not a character. Re-export it.",
        )  # fmt: skip
