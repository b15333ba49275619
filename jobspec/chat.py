"""The chat training format: one JSON object a line, as OpenAI defines it for supervised tuning.

`check_chat_file` reads a whole file and reports every fault with line and field (the first 100
errors and 100 warnings); `read_chat_rows` gives the rows of a file that has no error.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from jobspec.lines import bounded_lines

MIN_ROWS = 10
MAX_FINDINGS = 100
MAX_DEPTH = 20
MAX_KEYS = 10
DEFAULT_MAX_LINE_BYTES = 1 << 20
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
ROW_KEYS = {"messages", "tools", "parallel_tool_calls", "functions"}
MESSAGE_KEYS = {
    "role", "content", "name", "weight", "refusal", "tool_calls", "tool_call_id", "function_call",
}  # fmt: skip
TOOL_MESSAGE_KEYS = ("tool_calls", "function_call")


class Finding(NamedTuple):
    """One fault of a file: what, where (1-based line, JSON path) and what to do about it."""

    severity: Literal["error", "warning"]
    code: str
    line: int | None
    path: str | None
    message: str

    def sentence(self) -> str:
        where = "" if self.line is None else f"Line {self.line}: "
        field = "" if self.path is None else f" (field {self.path})"
        return f"{where}{self.message}{field}"


class ChatMessage(NamedTuple):
    """One turn; `trained` is true for assistant turns whose tokens carry loss."""

    role: Literal["system", "user", "assistant"]
    content: str
    trained: bool


class ChatRow(NamedTuple):
    """One training example and the line it stands on."""

    line: int
    messages: tuple[ChatMessage, ...]


class ChatFileReport(NamedTuple):
    """What is wrong with a file. `fatal`: it is not a JSON Lines text file at all."""

    rows: int
    findings: tuple[Finding, ...]
    error_count: int
    warning_count: int
    fatal: bool

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "warning")

    def summary(self, limit: int = 3) -> str:
        """The first errors in words, and how many more there are."""
        shown = [finding.sentence() for finding in self.errors[:limit]]
        more = self.error_count - len(shown)
        return " ".join([*shown, *([f"And {more} more errors."] if more > 0 else [])])


class _Findings:
    """Collects findings, keeping the first 100 of each severity and counting all."""

    def __init__(self) -> None:
        self.kept: list[Finding] = []
        self.counts = {"error": 0, "warning": 0}
        self.fatal = False

    def add(
        self,
        severity: Literal["error", "warning"],
        code: str,
        line: int | None,
        path: str | None,
        message: str,
        *,
        fatal: bool = False,
    ) -> None:
        self.counts[severity] += 1
        self.fatal = self.fatal or fatal
        if self.counts[severity] <= MAX_FINDINGS:
            self.kept.append(Finding(severity, code, line, path, message))


class _DuplicateKey(ValueError):
    pass


def _shown(text: str, limit: int = 40) -> str:
    """A key or role as a message may quote it: printable ASCII and short, never a tenant's text at
    length."""
    clean = "".join(char if char.isascii() and char.isprintable() else "?" for char in text[:limit])
    return clean + ("..." if len(text) > limit else "")


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKey(next(key for key in keys if keys.count(key) > 1))
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def check_chat_file(
    source: Path | BinaryIO,
    *,
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES,
    min_rows: int = MIN_ROWS,
) -> ChatFileReport:
    """Check a whole file; never raises for its content."""
    findings = _Findings()
    rows = sum(1 for _ in _scan(source, findings, max_line_bytes))
    if rows == 0 and findings.counts["error"] == 0:
        findings.add(
            "error", "empty_file", None, None,
            "The file is empty. Put one JSON object with a `messages` list on each line.",
            fatal=True,
        )  # fmt: skip
    elif rows < min_rows and not findings.fatal:
        findings.add(
            "error", "invalid_n_examples", None, None,
            f"The file has {rows} {'example' if rows == 1 else 'examples'}; at least {min_rows} "
            "are needed. Add more lines.",
        )  # fmt: skip
    return ChatFileReport(
        rows=rows,
        findings=tuple(findings.kept),
        error_count=findings.counts["error"],
        warning_count=findings.counts["warning"],
        fatal=findings.fatal,
    )


def read_chat_rows(
    path: Path, *, max_line_bytes: int = DEFAULT_MAX_LINE_BYTES
) -> tuple[list[ChatRow], ChatFileReport]:
    """The rows that are sound, and the report on the whole file."""
    findings = _Findings()
    scanned = list(_scan(path, findings, max_line_bytes))
    report = ChatFileReport(
        rows=len(scanned),
        findings=tuple(findings.kept),
        error_count=findings.counts["error"],
        warning_count=findings.counts["warning"],
        fatal=findings.fatal,
    )
    return [row for row in scanned if row is not None], report


def _scan(
    source: Path | BinaryIO, findings: _Findings, max_line_bytes: int
) -> Iterator[ChatRow | None]:
    """One item a non-blank line: the row, or None where the line has an error."""
    if isinstance(source, Path):
        with source.open("rb") as stream:
            yield from _scan(stream, findings, max_line_bytes)
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
        yield _row(line.number, line.content, line.bytes, findings, max_line_bytes)


def _row(
    number: int, content: bytes | None, size: int, findings: _Findings, max_line_bytes: int
) -> ChatRow | None:
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
            "error", "duplicate_key", number, _shown(str(error)), "The key stands twice. Keep one."
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
    before = findings.counts["error"]
    _check_text(value, number, "", 1, findings)
    messages = _messages(value, number, findings)
    return ChatRow(number, messages) if findings.counts["error"] == before else None


def _check_text(value: Any, line: int, path: str, depth: int, findings: _Findings) -> None:
    """Depth, and strings that no tokenizer can take (NUL, lone surrogates)."""
    if depth > MAX_DEPTH:
        findings.add(
            "error", "nested_too_deep", line, path, f"Nested deeper than {MAX_DEPTH} levels."
        )
    elif isinstance(value, str):
        _check_characters(value, line, path, findings)
    elif isinstance(value, dict):
        for key, item in value.items():
            inside = f"{path}.{_shown(key)}" if path else _shown(key)
            _check_characters(key, line, inside, findings)
            _check_text(item, line, inside, depth + 1, findings)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_text(item, line, f"{path}[{index}]", depth + 1, findings)


def _check_characters(text: str, line: int, path: str, findings: _Findings) -> None:
    if "\x00" in text:
        findings.add("error", "nul_byte", line, path, "The text has a NUL character. Remove it.")
    elif not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        findings.add(
            "error", "broken_unicode", line, path,
            "The text has half of a surrogate pair, which is not a character. Re-export it.",
        )  # fmt: skip


def _messages(row: dict[str, Any], line: int, findings: _Findings) -> tuple[ChatMessage, ...]:
    for key in sorted(set(row) - ROW_KEYS)[:MAX_KEYS]:
        findings.add(
            "error",
            "unknown_key",
            line,
            _shown(key),
            "The key is not part of the chat format. Remove it.",
        )
    for key in sorted(set(row) & {"tools", "functions", "parallel_tool_calls"}):
        findings.add(
            "warning", "tools_ignored", line, key, "Tool definitions are ignored: only text trains."
        )
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        problem = "is missing" if "messages" not in row else "must be a non-empty list"
        findings.add(
            "error", "missing_messages" if "messages" not in row else "invalid_messages", line,
            "messages", f"`messages` {problem}. Give the turns of the conversation as a list.",
        )  # fmt: skip
        return ()
    before = findings.counts["error"]
    turns = [
        turn
        for index, message in enumerate(messages)
        if (turn := _message(message, line, f"messages[{index}]", findings)) is not None
    ]
    if findings.counts["error"] == before and not any(turn.trained for turn in turns):
        has_assistant = any(turn.role == "assistant" for turn in turns)
        findings.add(
            "error", "no_assistant_message", line, "messages",
            "No assistant message has text and weight 1, so the example trains nothing."
            if has_assistant
            else "There is no assistant message, so the example trains nothing. Add the answer.",
        )  # fmt: skip
    return tuple(turns)


def _message(message: Any, line: int, path: str, findings: _Findings) -> ChatMessage | None:
    def error(code: str, field: str | None, text: str) -> None:
        findings.add("error", code, line, f"{path}.{field}" if field else path, text)

    if not isinstance(message, dict):
        error("invalid_message", None, "A message must be a JSON object with role and content.")
        return None
    for key in sorted(set(message) - MESSAGE_KEYS)[:MAX_KEYS]:
        error("unknown_key", _shown(key), "The key is not part of a message. Remove it.")
    role = message.get("role")
    if role not in ROLES:
        if isinstance(role, str):
            seen = f"'{_shown(role, 20)}' is unknown"
        else:
            seen = "is missing" if role is None else "must be a string"
        error("unknown_role", "role", f"The role {seen}. Use one of: {', '.join(ROLES)}.")
        return None
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        error("invalid_weight", "weight", "The weight must be 0 or 1.")
    elif "weight" in message and role != "assistant":
        error("invalid_weight", "weight", "Only assistant messages may carry a weight.")
    for key in TOOL_MESSAGE_KEYS:
        if message.get(key) is None:
            continue
        if role != "assistant":
            error("invalid_message", key, "Only assistant messages may call tools.")
        else:
            findings.add(
                "warning", "tools_ignored", line, f"{path}.{key}",
                "Tool calls are ignored: only text trains.",
            )  # fmt: skip
    if role in ("tool", "function"):
        findings.add(
            "warning", "tools_ignored", line, path, "Tool messages are ignored: only text trains."
        )
        return None
    content = _content(message, line, path, findings)
    if content is None:
        return None
    if role == "assistant":
        return ChatMessage("assistant", content, weight == 1 and bool(content.strip()))
    return ChatMessage("user" if role == "user" else "system", content, False)


def _content(message: dict[str, Any], line: int, path: str, findings: _Findings) -> str | None:
    """The text of a message; None when it has none that can be used."""
    content = message.get("content")
    if content is None and isinstance(message.get("refusal"), str):
        content = message["refusal"]
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = []
        for index, part in enumerate(content):
            text = part.get("text") if isinstance(part, dict) else None
            if (
                not isinstance(part, dict)
                or part.get("type") != "text"
                or not isinstance(text, str)
            ):
                findings.add(
                    "error", "invalid_content", line, f"{path}.content[{index}]",
                    'Only text parts {"type": "text", "text": ...} can be trained.',
                )  # fmt: skip
                return None
            texts.append(text)
        return "".join(texts)
    if content is None and any(message.get(key) is not None for key in TOOL_MESSAGE_KEYS):
        return None
    problem = "is missing" if content is None else "must be a string or a list of text parts"
    findings.add("error", "invalid_content", line, f"{path}.content", f"`content` {problem}.")
    return None
