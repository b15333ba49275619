import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobspec.chat import check_chat_file, read_chat_rows
from jobspec.findings import MAX_FINDINGS
from jobspec.lines import bounded_lines

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def check(*lines: Any, **options: Any):
    """Check lines given as JSON values, strings or bytes, padded with good ones."""
    encoded = [
        line
        if isinstance(line, bytes)
        else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    filler = [json.dumps(GOOD).encode()] * 10
    return check_chat_file(io.BytesIO(b"\n".join([*encoded, *filler])), **options)


def assistant(**changes: Any) -> dict[str, Any]:
    return {"messages": [GOOD["messages"][0], {"role": "assistant", "content": "b"} | changes]}


def test_a_good_file_has_no_findings():
    assert check(GOOD) == (11, (), 0, 0, False)


@pytest.mark.parametrize(
    ("line", "code", "path"),
    [
        ({}, "missing_messages", "messages"),
        ({"messages": []}, "invalid_messages", "messages"),
        ({"messages": "x"}, "invalid_messages", "messages"),
        ({"messages": [1]}, "invalid_message", "messages[0]"),
        ({"messages": [{"role": "user"}]}, "invalid_content", "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "unknown_role", "messages[0].role"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "unknown_role", "messages[0].role"),
        ({"messages": [{"role": {}, "content": "x"}]}, "unknown_role", "messages[0].role"),
        ({"messages": GOOD["messages"][:1]}, "no_assistant_message", "messages"),
        (assistant(weight=0), "no_assistant_message", "messages"),
        (assistant(content=" "), "no_assistant_message", "messages"),
        (assistant(weight=2), "invalid_weight", "messages[1].weight"),
        (assistant(weight=True), "invalid_weight", "messages[1].weight"),
        (assistant(colour=1), "unknown_key", "messages[1].colour"),
        (GOOD | {"extra": 1}, "unknown_key", "extra"),
        (assistant(content=[{"type": "image_url"}]), "invalid_content", "messages[1].content[0]"),
        ('{"messages": [], "messages": []}', "duplicate_key", "messages"),
        (assistant(content="a\x00b"), "nul_byte", "messages[1].content"),
        (assistant(content="\ud800"), "broken_unicode", "messages[1].content"),
        ('{"\\ud800k": 1}', "broken_unicode", "?k"),
        ('{"a\\u0000": 1}', "nul_byte", "a?"),
    ],
)
def test_a_faulty_row_is_named_by_line_and_field(line: Any, code: str, path: str):
    found = check(GOOD, line).errors[0]
    assert (found.code, found.line, found.path) == (code, 2, path)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"\xff\xfe", "not_utf8"),
        (b'{"a": "\xc3("}', "not_utf8"),
        (b"hello", "not_json"),
        (b'{"a": NaN}', "not_json"),
        (b"[1]", "not_an_object"),
        (b"\x00", "nul_byte"),
        (b"[" * 100_000, "nested_too_deep"),
    ],
)
def test_what_is_not_json_lines_is_fatal(line: bytes, code: str):
    report = check(GOOD, line)
    assert report.fatal
    assert (report.errors[0].code, report.errors[0].line) == (code, 2)


def test_a_line_over_the_limit_is_fatal_and_names_its_size():
    report = check(assistant(content="x" * 5000), max_line_bytes=1000)
    assert report.errors[0].code == "line_too_long"
    assert "1,000" in report.errors[0].message


def test_an_empty_file_is_fatal():
    report = check_chat_file(io.BytesIO(b""))
    assert report.fatal
    assert report.errors[0].code == "empty_file"


@pytest.mark.parametrize("rows", [1, 9])
def test_fewer_than_ten_examples_are_refused_with_their_number(rows: int):
    report = check_chat_file(io.BytesIO(b"\n".join([json.dumps(GOOD).encode()] * rows)))
    assert report.errors[0].code == "invalid_n_examples"
    assert str(rows) in report.errors[0].message


def test_a_byte_order_mark_crlf_and_a_blank_end_are_fine():
    text = b"\xef\xbb\xbf" + b"\r\n".join([json.dumps(GOOD).encode()] * 10) + b"\r\n\r\n"
    assert check_chat_file(io.BytesIO(text)).findings == ()


def test_a_blank_line_in_the_middle_is_named():
    assert check(GOOD, b"", GOOD).errors[0][1:3] == ("blank_line", 2)


def test_at_most_a_hundred_errors_are_listed_and_all_are_counted():
    report = check_chat_file(io.BytesIO(b"{}\n" * 250))
    assert len(report.errors) == MAX_FINDINGS
    assert report.error_count == 250


def test_tools_are_ignored_with_a_warning():
    report = check(GOOD | {"tools": []})
    assert [finding.code for finding in report.warnings] == ["tools_ignored"]
    assert report.errors == ()


def test_a_hostile_key_or_role_is_quoted_short():
    long = "x" * 100_000
    report = check({long: 1}, {"messages": [{"role": long, "content": "x"}]})
    assert len(report.summary(10)) < 1000


def test_rows_keep_their_turns_lines_and_weights(tmp_path: Any):
    path = tmp_path / "rows.jsonl"
    turns = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": "a", "weight": 0},
        {"role": "user", "content": "v"},
        {"role": "assistant", "content": "b"},
    ]
    path.write_text(json.dumps({"messages": turns}))
    rows, _ = read_chat_rows(path)
    assert rows[0].line == 1
    assert [(m.role, m.content, m.trained) for m in rows[0].messages] == [
        ("system", "s", False), ("user", "u", False), ("assistant", "a", False),
        ("user", "v", False), ("assistant", "b", True),
    ]  # fmt: skip


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)
messages = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "user", "assistant", "tool", "boss"]) | json_values,
        "content": st.text() | json_values,
        "weight": st.sampled_from([0, 1, 2]) | json_values,
        "tool_calls": json_values,
    },
)


@given(st.binary(max_size=400))
def test_no_bytes_make_the_check_raise(content: bytes):
    report = check_chat_file(io.BytesIO(content))
    assert report.error_count > 0


@settings(deadline=None)
@given(st.lists(st.fixed_dictionaries({"messages": st.lists(messages | json_values, max_size=3)})))
def test_no_json_makes_the_check_raise_and_errors_name_a_line(rows: list[Any]):
    text = "\n".join(json.dumps(row) for row in rows)
    report = check_chat_file(io.BytesIO(text.encode()), min_rows=0)
    assert all(finding.line is not None for finding in report.errors if rows)
    assert all(finding.sentence().isprintable() for finding in report.findings)


@given(
    parts=st.lists(st.binary(max_size=40).filter(lambda b: b"\n" not in b and b"\r" not in b)),
    ending=st.sampled_from([b"\n", b"\r\n"]),
)
def test_lines_are_split_as_they_were_joined(parts: list[bytes], ending: bytes):
    stream = io.BytesIO(ending.join(parts))
    lines = [line.content for line in bounded_lines(stream, 1000)]
    expected = list(parts)
    while expected and expected[-1] == b"":
        expected.pop()
    while lines and lines[-1] == b"":
        lines.pop()
    if parts and parts[0].startswith(b"\xef\xbb\xbf"):
        expected[0] = expected[0].removeprefix(b"\xef\xbb\xbf")
        while expected and expected[-1] == b"":
            expected.pop()
    assert lines == expected
