"""The chat training format: one JSON object a line, as OpenAI defines it for supervised tuning.

`check_chat_file` reads a whole file and reports every fault with line and field (the first 100
errors and 100 warnings); `read_chat_rows` gives the rows of a file that has no error.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from jobspec.findings import MIN_ROWS, FileReport, Findings, shown
from jobspec.json_lines import DEFAULT_MAX_LINE_BYTES, json_objects

MAX_KEYS = 10
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
ROW_KEYS = {"messages", "tools", "parallel_tool_calls", "functions"}
MESSAGE_KEYS = {
    "role", "content", "name", "weight", "refusal", "tool_calls", "tool_call_id", "function_call",
}  # fmt: skip
TOOL_ROW_KEYS = {"functions", "parallel_tool_calls", "tools"}
TOOL_MESSAGE_KEYS = ("tool_calls", "function_call")


class ChatMessage(NamedTuple):
    """One turn; `trained` is true for assistant turns whose tokens carry loss."""

    role: Literal["system", "user", "assistant"]
    content: str
    trained: bool


class ChatRow(NamedTuple):
    """One training example and the line it stands on."""

    line: int
    messages: tuple[ChatMessage, ...]


def check_chat_file(
    source: Path | BinaryIO,
    *,
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES,
    min_rows: int = MIN_ROWS,
) -> FileReport:
    """Check a whole file; never raises for its content."""
    findings = Findings()
    rows = sum(1 for _ in _scan(source, findings, max_line_bytes))
    findings.check_count(rows, min_rows, "a `messages` list")
    return findings.report(rows)


def read_chat_rows(
    path: Path, *, max_line_bytes: int = DEFAULT_MAX_LINE_BYTES
) -> tuple[list[ChatRow], FileReport]:
    """The rows that are sound, and the report on the whole file."""
    findings = Findings()
    scanned = list(_scan(path, findings, max_line_bytes))
    return [row for row in scanned if row is not None], findings.report(len(scanned))


def _scan(
    source: Path | BinaryIO, findings: Findings, max_line_bytes: int
) -> Iterator[ChatRow | None]:
    """One item a non-blank line: the row, or None where the line has an error."""
    for line in json_objects(source, findings, max_line_bytes):
        if line.value is None:
            yield None
            continue
        before = findings.errors
        messages = _messages(line.value, line.number, findings)
        sound = line.sound and findings.errors == before
        yield ChatRow(line.number, messages) if sound else None


def _messages(row: dict[str, Any], line: int, findings: Findings) -> tuple[ChatMessage, ...]:
    check_keys(row, ROW_KEYS, line, "", "the chat format", findings)
    before = findings.errors
    turns = read_turns(row, line, "", findings)
    if findings.errors == before and not any(turn.trained for turn in turns):
        has_assistant = any(turn.role == "assistant" for turn in turns)
        findings.add(
            "error", "no_assistant_message", line, "messages",
            "No assistant message has text and weight 1, so the example trains nothing."
            if has_assistant
            else "There is no assistant message, so the example trains nothing. Add the answer.",
        )  # fmt: skip
    return turns


def check_keys(
    value: dict[str, Any], known: set[str], line: int, inside: str, whole: str, findings: Findings
) -> None:
    """Add unknown keys of an object at the JSON path `inside` ("" or "input."), and tools."""
    for key in sorted(set(value) - known)[:MAX_KEYS]:
        findings.add(
            "error", "unknown_key", line, inside + shown(key),
            f"The key is not part of {whole}. Remove it.",
        )  # fmt: skip
    for key in sorted(set(value) & known & TOOL_ROW_KEYS):
        findings.add(
            "warning", "tools_ignored", line, inside + key,
            "Tool definitions are ignored: only text trains.",
        )  # fmt: skip


def read_turns(
    value: dict[str, Any], line: int, inside: str, findings: Findings
) -> tuple[ChatMessage, ...]:
    """The turns of `value["messages"]`, an object at the JSON path `inside`; tool turns are left
    out."""
    messages = value.get("messages")
    if not isinstance(messages, list) or not messages:
        problem = "is missing" if "messages" not in value else "must be a non-empty list"
        findings.add(
            "error", "missing_messages" if "messages" not in value else "invalid_messages", line,
            f"{inside}messages",
            f"`messages` {problem}. Give the turns of the conversation as a list.",
        )  # fmt: skip
        return ()
    return tuple(
        turn
        for index, message in enumerate(messages)
        if (turn := read_message(message, line, f"{inside}messages[{index}]", findings)) is not None
    )


def read_message(message: Any, line: int, path: str, findings: Findings) -> ChatMessage | None:
    """One turn; None where it is a tool's, has no text, or is faulty."""

    def error(code: str, field: str | None, text: str) -> None:
        findings.add("error", code, line, f"{path}.{field}" if field else path, text)

    if not isinstance(message, dict):
        error("invalid_message", None, "A message must be a JSON object with role and content.")
        return None
    for key in sorted(set(message) - MESSAGE_KEYS)[:MAX_KEYS]:
        error("unknown_key", shown(key), "The key is not part of a message. Remove it.")
    role = message.get("role")
    if role not in ROLES:
        if isinstance(role, str):
            seen = f"'{shown(role, 20)}' is unknown"
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


def _content(message: dict[str, Any], line: int, path: str, findings: Findings) -> str | None:
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
