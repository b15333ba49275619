import io
import json
from pathlib import Path

import pytest

from jobspec.formats import check_training_file, detect_format, format_of, wrong_format

CHAT = b'{"messages": []}\n'
PREFERENCE = b'{"input": {}, "preferred_output": [], "non_preferred_output": []}\n'


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (CHAT * 3, "chat"),
        (PREFERENCE * 3, "preference"),
        (b'{"preferred_output": 1}', "preference"),
        (b"\xef\xbb\xbf" + CHAT.replace(b"\n", b"\r\n"), "chat"),
        (b"hello\n\n{}\n" + PREFERENCE + CHAT, "preference"),
        (b'{"prompt": "x"}\n' * 3, None),
        (b"{}\n" * 10 + CHAT, None),
        (b"", None),
        (b"\x00\xff", None),
        (b"[" * 100_000, None),
        (b'{"messages": 1, "messages": 1}', None),
    ],
)
def test_the_first_row_that_shows_a_format_decides(content: bytes, expected: str | None):
    assert detect_format(io.BytesIO(content)) == expected


def test_a_path_is_detected_like_its_content(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(PREFERENCE)
    assert detect_format(path) == "preference"


def test_a_row_of_the_other_format_in_the_middle_is_an_error_of_its_line():
    question = {"role": "user", "content": "a"}
    chat = {"messages": [question, {"role": "assistant", "content": "b"}]}
    pair = {
        "input": {"messages": [question]},
        "preferred_output": [{"role": "assistant", "content": "b"}],
        "non_preferred_output": [{"role": "assistant", "content": "c"}],
    }
    text = "\n".join(json.dumps(row) for row in [*[pair] * 10, chat]).encode()
    report = check_training_file(io.BytesIO(text), "preference")
    assert {finding.line for finding in report.errors} == {11}
    text = "\n".join(json.dumps(row) for row in [*[chat] * 10, pair]).encode()
    report = check_training_file(io.BytesIO(text), "chat")
    assert {finding.line for finding in report.errors} == {11}


def test_a_mismatch_says_which_format_was_seen_and_which_method_was_asked():
    assert (format_of("dpo"), format_of("supervised")) == ("preference", "chat")
    sentence = wrong_format("chat", "dpo")
    assert "in the chat format" in sentence
    assert "the method is dpo" in sentence
