import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobspec.chat import ChatMessage
from jobspec.findings import MAX_FINDINGS
from jobspec.preference import check_preference_file, read_preference_rows

QUESTION = {"role": "user", "content": "Is snow cold?"}
GOOD = {
    "input": {"messages": [QUESTION]},
    "preferred_output": [{"role": "assistant", "content": "Yes."}],
    "non_preferred_output": [{"role": "assistant", "content": "No."}],
}


def check(*lines: Any, **options: Any):
    """Check lines given as JSON values or bytes, padded with good ones."""
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    filler = [json.dumps(GOOD).encode()] * 10
    return check_preference_file(io.BytesIO(b"\n".join([*encoded, *filler])), **options)


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GOOD.items() if key != name}


def asked(*messages: Any, **more: Any) -> dict[str, Any]:
    return GOOD | {"input": {"messages": list(messages)} | more}


def preferred(*messages: Any) -> dict[str, Any]:
    return GOOD | {"preferred_output": list(messages)}


def answer(**changes: Any) -> dict[str, Any]:
    return preferred({"role": "assistant", "content": "Yes."} | changes)


def test_a_good_file_has_no_findings():
    assert check(GOOD) == (11, (), 0, 0, False)


@pytest.mark.parametrize(
    ("line", "code", "path"),
    [
        (without("input"), "missing_input", "input"),
        (GOOD | {"input": [QUESTION]}, "invalid_input", "input"),
        (GOOD | {"input": {}}, "missing_messages", "input.messages"),
        (asked(), "invalid_messages", "input.messages"),
        (asked({"role": "user"}), "invalid_content", "input.messages[0].content"),
        (asked(QUESTION, {"role": "boss"}), "unknown_role", "input.messages[1].role"),
        (asked(QUESTION, colour=1), "unknown_key", "input.colour"),
        (
            asked(QUESTION, {"role": "assistant", "content": "Yes"}),
            "invalid_input",
            "input.messages",
        ),
        (asked({"role": "tool", "content": "x"}), "invalid_input", "input.messages"),
        (without("preferred_output"), "missing_output", "preferred_output"),
        (without("non_preferred_output"), "missing_output", "non_preferred_output"),
        (GOOD | {"preferred_output": "Yes"}, "invalid_output", "preferred_output"),
        (GOOD | {"preferred_output": None}, "invalid_output", "preferred_output"),
        (preferred(), "invalid_output", "preferred_output"),
        (preferred(QUESTION, QUESTION), "invalid_output", "preferred_output"),
        (preferred(QUESTION), "invalid_output", "preferred_output[0].role"),
        (preferred({"role": "tool", "content": "x"}), "invalid_output", "preferred_output[0].role"),
        (preferred("Yes"), "invalid_message", "preferred_output[0]"),
        (answer(content=""), "invalid_output", "preferred_output[0].content"),
        (answer(content=" \n"), "invalid_output", "preferred_output[0].content"),
        (answer(content=None), "invalid_content", "preferred_output[0].content"),
        (answer(content=None, tool_calls=[]), "invalid_output", "preferred_output[0].content"),
        (answer(weight=1), "invalid_weight", "preferred_output[0].weight"),
        (answer(colour=1), "unknown_key", "preferred_output[0].colour"),
        (answer(content="No."), "equal_outputs", "non_preferred_output"),
        (GOOD | {"extra": 1}, "unknown_key", "extra"),
        (answer(content="\ud800"), "broken_unicode", "preferred_output[0].content"),
        (b'{"input": {}, "input": {}}', "duplicate_key", "input"),
    ],
)
def test_a_faulty_row_is_named_by_line_and_field(line: Any, code: str, path: str):
    report = check(GOOD, line)
    found = report.errors[0]
    assert (found.code, found.line, found.path) == (code, 2, path)
    assert not report.fatal


def test_every_faulty_part_of_a_row_is_told():
    report = check({"input": {"messages": []}, "preferred_output": [], "other": 1})
    assert [finding.path for finding in report.errors] == [
        "other", "input.messages", "preferred_output", "non_preferred_output",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"\xff\xfe", "not_utf8"),
        (b"hello", "not_json"),
        (b"[1]", "not_an_object"),
        (b"\x00", "nul_byte"),
        (b"{" + b"a" * 5000, "line_too_long"),
    ],
)
def test_what_is_not_json_lines_is_fatal(line: bytes, code: str):
    report = check(GOOD, line, max_line_bytes=4096)
    assert report.fatal
    assert (report.errors[0].code, report.errors[0].line) == (code, 2)


@pytest.mark.parametrize("rows", [1, 9])
def test_a_file_with_too_few_rows_says_how_many_it_has(rows: int):
    report = check_preference_file(io.BytesIO(b"\n".join([json.dumps(GOOD).encode()] * rows)))
    assert [finding.code for finding in report.errors] == ["invalid_n_examples"]
    assert f"has {rows} example" in report.summary()


def test_an_empty_file_is_fatal_and_told_what_a_line_holds():
    report = check_preference_file(io.BytesIO(b""))
    assert report.fatal
    assert "preferred_output" in report.summary()


def test_tools_are_ignored_with_a_warning():
    report = check(
        asked(QUESTION, tools=[], parallel_tool_calls=True),
        asked(QUESTION, {"role": "assistant", "content": None, "tool_calls": [{}]}, QUESTION),
        asked({"role": "tool", "content": "x"}, QUESTION),
    )
    assert report.error_count == 0
    assert {(finding.code, finding.path) for finding in report.warnings} == {
        ("tools_ignored", "input.tools"),
        ("tools_ignored", "input.parallel_tool_calls"),
        ("tools_ignored", "input.messages[1].tool_calls"),
        ("tools_ignored", "input.messages[0]"),
    }


def test_a_row_is_read_with_no_trained_turn_before_the_answer(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    earlier = {"role": "assistant", "content": "Hello"}
    path.write_text(json.dumps(asked({"role": "developer", "content": "Hi"}, earlier, QUESTION)))
    rows, report = read_preference_rows(path)
    assert report.error_count == 0
    assert rows[0].messages == (
        ChatMessage("system", "Hi", False),
        ChatMessage("assistant", "Hello", False),
        ChatMessage("user", "Is snow cold?", False),
    )
    assert rows[0].preferred == ChatMessage("assistant", "Yes.", True)
    assert rows[0].rejected == ChatMessage("assistant", "No.", True)
    assert rows[0].chosen_side.messages == (*rows[0].messages, rows[0].preferred)
    assert rows[0].rejected_side.messages == (*rows[0].messages, rows[0].rejected)


def test_only_sound_rows_are_read_with_their_lines(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in (GOOD, without("input"), GOOD)))
    rows, report = read_preference_rows(path)
    assert [row.line for row in rows] == [1, 3]
    assert (report.rows, report.error_count) == (3, 1)


def test_a_byte_order_mark_crlf_and_text_parts_are_accepted():
    parts = [{"type": "text", "text": "Yes"}]
    lines = [json.dumps(answer(content=parts)).encode()] * 10
    text = b"\xef\xbb\xbf" + b"\r\n".join(lines) + b"\r\n"
    assert check_preference_file(io.BytesIO(text)).findings == ()


def test_only_the_first_findings_are_kept_and_all_are_counted():
    report = check_preference_file(io.BytesIO(b'{"preferred_output": []}\n' * 250))
    assert len(report.errors) == MAX_FINDINGS
    assert report.error_count == 750


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "tool", "x"]),
            "content": json_values,
            "weight": json_values,
            "tool_calls": json_values,
        },
    )
    | json_values,
    max_size=2,
)


@settings(deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "input": st.fixed_dictionaries({"messages": messages}) | json_values,
                "preferred_output": messages | json_values,
                "non_preferred_output": messages | json_values,
            },
        ),
        max_size=3,
    )
)
def test_no_json_makes_the_check_raise_and_errors_name_a_line(rows: list[Any]):
    text = "\n".join(json.dumps(row) for row in rows)
    report = check_preference_file(io.BytesIO(text.encode()), min_rows=0)
    assert all(finding.line is not None for finding in report.errors if rows)
    assert all(finding.sentence().isprintable() for finding in report.findings)
