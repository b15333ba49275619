"""The preference format of DPO: a conversation, the better answer to it and the worse one.

A line is `{"input": {"messages": [...]}, "preferred_output": [assistant message],
"non_preferred_output": [assistant message]}`, as OpenAI defines it. Each output is one assistant
message, and the two differ.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jobspec.chat import ChatMessage, ChatRow, check_keys, read_message, read_turns
from jobspec.findings import MIN_ROWS, FileReport, Findings
from jobspec.json_lines import DEFAULT_MAX_LINE_BYTES, json_objects

PREFERENCE_KEYS = {"input", "preferred_output", "non_preferred_output"}
INPUT_KEYS = {"messages", "tools", "parallel_tool_calls"}


class PreferenceRow(NamedTuple):
    """One comparison and the line it stands on. No message of the input carries loss."""

    line: int
    messages: tuple[ChatMessage, ...]
    preferred: ChatMessage
    rejected: ChatMessage

    @property
    def chosen_side(self) -> ChatRow:
        """The conversation with the preferred answer, as a supervised example."""
        return ChatRow(self.line, (*self.messages, self.preferred))

    @property
    def rejected_side(self) -> ChatRow:
        """The conversation with the answer that is not preferred."""
        return ChatRow(self.line, (*self.messages, self.rejected))


def check_preference_file(
    source: Path | BinaryIO,
    *,
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES,
    min_rows: int = MIN_ROWS,
) -> FileReport:
    """Check a whole file; never raises for its content."""
    findings = Findings()
    rows = sum(1 for _ in _scan(source, findings, max_line_bytes))
    findings.check_count(rows, min_rows, "`input`, `preferred_output` and `non_preferred_output`")
    return findings.report(rows)


def read_preference_rows(
    path: Path, *, max_line_bytes: int = DEFAULT_MAX_LINE_BYTES
) -> tuple[list[PreferenceRow], FileReport]:
    """The rows that are sound, and the report on the whole file."""
    findings = Findings()
    scanned = list(_scan(path, findings, max_line_bytes))
    return [row for row in scanned if row is not None], findings.report(len(scanned))


def _scan(
    source: Path | BinaryIO, findings: Findings, max_line_bytes: int
) -> Iterator[PreferenceRow | None]:
    """One item a non-blank line: the row, or None where the line has an error."""
    for line in json_objects(source, findings, max_line_bytes):
        if line.value is None:
            yield None
            continue
        before = findings.errors
        row = _row(line.value, line.number, findings)
        yield row if line.sound and findings.errors == before else None


def _row(value: dict[str, Any], line: int, findings: Findings) -> PreferenceRow | None:
    """The row; None where it has a fault. Every part is looked at, so that all faults are told."""
    check_keys(value, PREFERENCE_KEYS, line, "", "the preference format", findings)
    messages = _input(value, line, findings)
    preferred = _output(value, "preferred_output", line, findings)
    rejected = _output(value, "non_preferred_output", line, findings)
    if preferred is None or rejected is None:
        return None
    if preferred == rejected:
        findings.add(
            "error", "equal_outputs", line, "non_preferred_output",
            "The preferred and the non-preferred answer are equal, so nothing is preferred. Give "
            "two different answers.",
        )  # fmt: skip
        return None
    return PreferenceRow(line, messages, preferred, rejected)


def _input(value: dict[str, Any], line: int, findings: Findings) -> tuple[ChatMessage, ...]:
    inside = value.get("input")
    if not isinstance(inside, dict):
        problem = "is missing" if "input" not in value else "must be a JSON object"
        findings.add(
            "error", "missing_input" if "input" not in value else "invalid_input", line, "input",
            f"`input` {problem}. Give an object with the `messages` before the answer.",
        )  # fmt: skip
        return ()
    check_keys(inside, INPUT_KEYS, line, "input.", "an input", findings)
    before = findings.errors
    turns = read_turns(inside, line, "input.", findings)
    if findings.errors == before and (not turns or turns[-1].role == "assistant"):
        findings.add(
            "error", "invalid_input", line, "input.messages",
            "The conversation must end before the answer: its last message with text may not be "
            "the assistant's.",
        )  # fmt: skip
    return tuple(turn._replace(trained=False) for turn in turns)


def _output(value: dict[str, Any], name: str, line: int, findings: Findings) -> ChatMessage | None:
    def error(code: str, path: str, text: str) -> None:
        findings.add("error", code, line, path, text)

    output = value.get(name)
    if not isinstance(output, list) or len(output) != 1:
        if name not in value:
            error("missing_output", name, f"`{name}` is missing. Give one assistant message.")
        elif isinstance(output, list):
            error("invalid_output", name, f"`{name}` has {len(output)} messages; give exactly one.")
        else:
            error("invalid_output", name, f"`{name}` must be a list with one assistant message.")
        return None
    path = f"{name}[0]"
    before = findings.errors
    message = read_message(output[0], line, path, findings)
    if findings.errors > before:
        return None
    if output[0]["role"] != "assistant":
        error("invalid_output", f"{path}.role", "An output must be an assistant message.")
        return None
    if "weight" in output[0]:
        error("invalid_weight", f"{path}.weight", "An output has no weight. Remove it.")
        return None
    if message is None or not message.trained:
        error("invalid_output", f"{path}.content", "The answer has no text. Write one.")
        return None
    return message
