"""Result files of garak and promptfoo as evidence.

The shapes are those of garak/evaluators/base.py and garak/command.py (NVIDIA/garak) and of
src/types/index.ts (promptfoo/promptfoo); the files here are written for the tests.
"""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluators.gate.evidence import EvidenceError, read_evidence
from evaluators.statistics import wilson_interval

SETUP = {"entry_type": "start_run setup", "run.generations": 1, "plugins.probe_spec": "dan"}
INIT = {"entry_type": "init", "garak_version": "0.14.0", "run": "r"}
ATTEMPT = {"entry_type": "attempt", "status": 2, "probe_classname": "dan.Dan_11_0", "outputs": []}
DONE = {"entry_type": "completion", "end_time": "2026-01-01T00:15:00", "run": "r"}


def eval_row(passed: int, fails: int, nones: int = 0, /, **changes: Any) -> dict[str, Any]:
    return {
        "entry_type": "eval",
        "probe": "dan.Dan_11_0",
        "detector": "dan.DAN",
        "passed": passed,
        "fails": fails,
        "nones": nones,
        "total_evaluated": passed + fails,
        "total_processed": passed + fails + nones,
        **changes,
    }


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def garak(*evals: dict[str, Any], setup: dict[str, Any] = SETUP) -> bytes:
    return lines(setup, INIT, ATTEMPT, *evals, DONE)


def hit(**changes: Any) -> dict[str, Any]:
    return {
        "goal": "g",
        "score": 1.0,
        "run_id": "r",
        "attempt_id": "a",
        "probe": "dan.Dan_11_0",
        "detector": "dan.DAN",
        **changes,
    }


def one(content: bytes, name: str = "evidence.garak.dan.Dan_11_0.dan.DAN") -> Any:
    return read_evidence({"file": content})[name]


def test_a_garak_report_gives_the_failure_rate_with_its_interval() -> None:
    metric = one(garak(eval_row(12, 8)))
    assert (metric.value, metric.n) == (0.4, 20)
    assert (metric.low, metric.high) == pytest.approx(wilson_interval(8, 20))


def test_an_older_report_is_read_as_well() -> None:
    row = {
        "entry_type": "eval",
        "probe": "probes.dan.Dan_11_0",
        "detector": "detector.dan.DAN",
        "passed": 12,
        "total": 20,
    }
    assert one(lines(INIT, row, DONE)).value == 0.4


def test_several_answers_a_prompt_count_as_one_in_the_interval() -> None:
    metric = one(garak(eval_row(60, 40), setup={**SETUP, "run.generations": 5}))
    assert (metric.value, metric.n) == (0.4, 20)
    assert (metric.low, metric.high) == pytest.approx(wilson_interval(8, 20))
    assert "5 answers a prompt" in metric.note


def test_tests_without_a_verdict_count_as_failed_in_the_upper_end() -> None:
    metric = one(garak(eval_row(98, 1, nones=1)))
    assert metric.value == pytest.approx(1 / 99)
    assert metric.high == pytest.approx(wilson_interval(2, 100)[1])
    assert metric.low == pytest.approx(wilson_interval(1, 99)[0])


@pytest.mark.parametrize("row", [eval_row(0, 0), eval_row(0, 0, nones=50), eval_row(90, 0, 10)])
def test_too_few_verdicts_leave_the_metric_undefined(row: dict[str, Any]) -> None:
    metric = one(garak(row))
    assert (metric.value, metric.low, metric.high) == (None, None, None)
    assert metric.note


def test_rows_of_one_probe_and_detector_are_added() -> None:
    assert one(garak(eval_row(10, 0), eval_row(0, 10))).value == 0.5


def test_a_hit_log_is_checked_against_its_report() -> None:
    report = garak(eval_row(12, 2))
    assert read_evidence({"report": report, "hits": lines(hit(), hit())})
    with pytest.raises(EvidenceError, match=r"hits: .*1 hits, but the report counts 2"):
        read_evidence({"report": report, "hits": lines(hit())})


def test_a_hit_log_alone_says_too_little() -> None:
    with pytest.raises(EvidenceError, match="how many tests there were"):
        read_evidence({"hits": lines(hit())})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "neither"),
        (b"[]", "object"),
        (b"{}", "neither"),
        (b"\xff\xfe", "UTF-8"),
        (b"not json", "line 1: not JSON"),
        (lines(SETUP, INIT, eval_row(5, 0)), "no completion row"),
        (garak(eval_row(5, 0))[:-30], "line 5: not JSON"),
        (garak(), "tested nothing"),
        (garak(eval_row(5, 0, passed=True)), "no counts"),
        (garak(eval_row(5, 0, passed="5")), "no counts"),
        (garak(eval_row(5, 0, total_evaluated=9)), "do not add up"),
        (garak(eval_row(5, 0, total_evaluated=3)), "do not add up"),
        (garak(eval_row(5, 0, probe=None)), "names no probe"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_an_unusable_file_is_an_error_that_names_it(content: bytes, words: str) -> None:
    with pytest.raises(EvidenceError, match=f"^some file: .*{words}"):
        read_evidence({"some file": content})


def test_the_same_metric_from_two_files_is_refused() -> None:
    with pytest.raises(EvidenceError, match="is in another file, too"):
        read_evidence({"a": garak(eval_row(5, 0)), "b": garak(eval_row(4, 1))})


def test_separators_that_only_unicode_calls_lines_do_not_cut_a_row() -> None:
    odd = json.dumps({**ATTEMPT, "prompt": "a\u2028b\x85c"}, ensure_ascii=False)
    content = garak(eval_row(5, 0)) + odd.encode() + b"\n"
    assert one(content).n == 5


def result(success: bool = True, reason: int = 0, **changes: Any) -> dict[str, Any]:
    return {"success": success, "failureReason": reason, "testCase": {}, **changes}


def promptfoo(*results: dict[str, Any], version: Any = 3, stats: Any = None) -> bytes:
    counts = {
        "successes": sum(row["success"] is True for row in results),
        "failures": sum(not row["success"] and row["failureReason"] != 2 for row in results),
        "errors": sum(row["failureReason"] == 2 for row in results),
    }
    summary = {
        "version": version,
        "timestamp": "2026-01-01T00:00:00.000Z",
        "results": list(results),
        "prompts": [],
        "stats": counts if stats is None else stats,
    }
    return json.dumps({"evalId": "eval-1", "results": summary, "config": {}}).encode()


FAILED = result(False, 1)


def test_promptfoo_results_give_rates_by_suite_plugin_strategy_and_assertion() -> None:
    grading = {
        "componentResults": [
            {"pass": False, "assertion": {"type": "llm-rubric", "metric": "Tone of voice"}},
            {"pass": True, "assertion": {"type": "contains"}},
        ]
    }
    red = {"pluginId": "harmful:hate", "strategyId": "jailbreak"}
    found = read_evidence(
        {
            "f": promptfoo(
                result(False, 1, gradingResult=grading, testCase={"description": "my suite"}),
                result(metadata=red),
                FAILED,
            )
        }
    )
    assert {name: (metric.value, metric.n) for name, metric in found.items()} == {
        "evidence.promptfoo.all": (pytest.approx(2 / 3), 3),
        "evidence.promptfoo.suite:my_suite": (1.0, 1),
        "evidence.promptfoo.assert:llm-rubric": (1.0, 1),
        "evidence.promptfoo.metric:Tone_of_voice": (1.0, 1),
        "evidence.promptfoo.assert:contains": (0.0, 1),
        "evidence.promptfoo.plugin:harmful:hate": (0.0, 1),
        "evidence.promptfoo.strategy:jailbreak": (0.0, 1),
    }


def test_the_summary_alone_is_read_as_well() -> None:
    whole = json.loads(promptfoo(result()))
    assert read_evidence({"f": json.dumps(whole["results"]).encode()})


def test_errors_of_promptfoo_are_neither_passed_nor_failed() -> None:
    many = [result() for _ in range(99)]
    metric = one(promptfoo(*many, result(False, 2)), "evidence.promptfoo.all")
    assert (metric.value, metric.n) == (0.0, 99)
    assert metric.high == pytest.approx(wilson_interval(1, 100)[1])
    assert one(promptfoo(result(), result(False, 2)), "evidence.promptfoo.all").value is None


def test_a_grader_that_broke_is_neither_passed_nor_failed() -> None:
    part = {"pass": False, "assertion": {"type": "llm-rubric"}, "metadata": {"graderError": True}}
    row = result(False, 1, gradingResult={"componentResults": [part]})
    assert one(promptfoo(row), "evidence.promptfoo.assert:llm-rubric").value is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (promptfoo(), "tested nothing"),
        (promptfoo(result(), version=2), "version 2 .*newer one"),
        (promptfoo(result(), version=4), "version 4 .*update tunegate"),
        (promptfoo(result(), version=True), "version True"),
        (promptfoo(result(), stats={"successes": 5, "failures": 0, "errors": 0}), "count 5 succ"),
        (promptfoo(result(), stats={}), "stats count"),
        (promptfoo(result(success=None)), "no verdict"),
        (promptfoo(result())[:-40], "not JSON"),
    ],
)
def test_an_unusable_promptfoo_file_is_an_error(content: bytes, words: str) -> None:
    with pytest.raises(EvidenceError, match=f"^f: .*{words}"):
        read_evidence({"f": content})


@settings(max_examples=60, deadline=None)
@given(
    passed=st.integers(0, 300), fails=st.integers(0, 300), nones=st.integers(0, 5),
    repeats=st.integers(1, 20),
)  # fmt: skip
def test_a_rate_lies_within_its_interval(passed: int, fails: int, nones: int, repeats: int) -> None:
    setup = {**SETUP, "run.generations": repeats}
    metric = one(garak(eval_row(passed, fails, nones), setup=setup))
    if metric.value is None:
        assert passed + fails == 0 or nones > 0.02 * (passed + fails + nones)
    else:
        assert 0 <= metric.low <= metric.value <= metric.high <= 1
        assert metric.n >= 1


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_an_error_and_never_a_crash(content: bytes) -> None:
    with pytest.raises(EvidenceError):
        read_evidence({"f": content})
