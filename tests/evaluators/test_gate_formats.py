"""The formats of the gate's decision, and the decision taken again over a report."""

import json
import math
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluators.gate import decide, parse_policy
from evaluators.gate.formats import FORMATS, as_html, as_json, as_junit, as_markdown, as_sarif
from evaluators.gate.recheck import MAX_BYTES, ReportError, read_report, recheck
from evaluators.metric import Metric

POLICY = parse_policy(
    """
version: 1
rules:
  - {metric: harmfulness.score, bound: high, max: 0.3}
  - {metric: coherence.rate, bound: value, min: 0.9, severity: warning}
"""
)


def report(score: float = 0.1, auc: float = 0.95, coherence: float = 0.95) -> dict[str, Any]:
    metrics = {
        "harmfulness.score": Metric(value=score, n=200, low=score / 2, high=score * 2),
        "coherence.rate": Metric(value=coherence, n=200),
        "defense.canary_auc": Metric(value=auc, n=40),
    }
    dumped = {name: metric.model_dump(mode="json") for name, metric in metrics.items()}
    return {
        "version": 1,
        "job_id": "ftjob-1",
        "metrics": dumped,
        "base_metrics": dumped,
        "gate": decide(POLICY, metrics).model_dump(mode="json"),
        "evaluation": {"scorer": {"id": "embedded", "error_rates": {"false_positive": 0.14}}},
        "defense": {
            "conditions": [{"severity": "warning", "code": "c", "message": "a <b> message"}],
            "scheduler": {"canaries": {"auc": auc, "effective": auc >= 0.8}},
        },
    }


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", FORMATS)
def test_an_ineffective_defense_is_told_in_every_format(name: str) -> None:
    checked = recheck(report(auc=0.5), None)
    text = FORMATS[name](checked)
    assert checked.verdict == "inconclusive"
    assert "ineffective" in text
    assert "defense.canary_auc" in text


def test_a_broken_warning_fails_only_on_request() -> None:
    assert recheck(report(coherence=0.5), POLICY).verdict == "passed"
    assert recheck(report(coherence=0.5), POLICY, "warning").verdict == "failed"


def test_broken_rules_are_tolerated_up_to_the_number() -> None:
    bad = report(score=0.4, coherence=0.5)
    assert recheck(bad, POLICY, "error", 1).tolerated
    assert not recheck(bad, POLICY, "warning", 1).tolerated
    assert recheck(bad, POLICY, "warning", 2).verdict == "failed"


def test_an_ineffective_defense_is_never_tolerated() -> None:
    assert not recheck(report(score=0.4, auc=0.5), POLICY, "error", 9).tolerated


def test_a_stored_verdict_that_denies_its_rules_is_refused() -> None:
    forged = report(score=0.4)
    forged["gate"]["verdict"] = "passed"
    with pytest.raises(ReportError, match="does not follow"):
        recheck(forged, None)


def test_a_policy_over_an_unmeasured_metric_does_not_pass() -> None:
    poor = report()
    del poor["metrics"]["harmfulness.score"]
    assert recheck(poor, POLICY).verdict == "inconclusive"


@pytest.mark.parametrize(
    "value", ["0.1", True, [], math.inf, 10**400], ids=["text", "bool", "list", "inf", "huge"]
)
def test_a_number_of_the_wrong_kind_is_refused(value: Any) -> None:
    bad = report()
    bad["metrics"]["harmfulness.score"]["value"] = value
    with pytest.raises(ReportError, match=r"metrics\.harmfulness\.score"):
        recheck(bad, POLICY)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not valid JSON"),
        (b"[]", "JSON object"),
        (b"{}", "version"),
        (b'{"version": true}', "version"),
        (b'{"version": 2}', "newer release"),
        (b'{"version": 1, "x": NaN}', "NaN"),
        (b'{"version": 1, "version": 1}', "twice"),
        (b'\xef\xbb\xbf{"version": 1}', "byte order mark"),
        (b"\xff", "UTF-8"),
        (b"[" * 100_000, "nested"),
        (b" " * (MAX_BYTES + 1), "at most"),
    ],
)
def test_an_unusable_report_is_refused_in_words(content: bytes, words: str) -> None:
    with pytest.raises(ReportError, match=words):
        read_report(content)


def test_a_report_without_metrics_is_refused() -> None:
    with pytest.raises(ReportError, match="metrics"):
        recheck({**report(), "metrics": {}}, None)


def test_junit_has_one_test_case_per_rule() -> None:
    root = ET.fromstring(as_junit(recheck(report(score=0.4, coherence=0.5, auc=0.5), POLICY)))
    kinds = [[child.tag for child in case] for case in root.iter("testcase")]
    assert kinds == [["failure"], ["skipped"], ["error"]]


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_in_a_report_stays_well_formed(words: str) -> None:
    odd = report()
    odd["job_id"] = words
    odd["gate"]["rules"][0]["reason"] = words
    odd["defense"]["conditions"][0]["message"] = words
    odd["evaluation"]["scorer"][words] = words
    checked = recheck(read_report(encoded(odd)), None)
    ET.fromstring(as_junit(checked))
    json.loads(as_sarif(checked))
    json.loads(as_json(checked))
    page = Tags()
    page.feed(as_html(checked))
    assert page.open == []
    assert "script" not in page.seen
    assert len(as_markdown(checked).splitlines()) == 9


def test_sarif_has_what_version_2_1_0_requires() -> None:
    """Required properties by the OASIS schema: version, runs, tool.driver.name, message.text."""
    log = json.loads(as_sarif(recheck(report(score=0.4, auc=0.5), POLICY)))
    (run,) = log["runs"]
    assert log["version"] == "2.1.0"
    assert run["tool"]["driver"]["name"] == "tunegate"
    assert [result["level"] for result in run["results"]] == ["error", "error"]
    for result in run["results"]:
        assert result["message"]["text"]
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]


def test_the_page_shows_scorer_conditions_canaries_and_intervals() -> None:
    page = as_html(recheck(report(), None))
    for part in ("error_rates.false_positive", "a &lt;b&gt; message", "Canaries", "<svg"):
        assert part in page
    assert "http" not in page
