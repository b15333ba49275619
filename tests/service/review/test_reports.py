"""A job's report in six forms, by Accept header or by suffix."""

import json
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest

from service.fine_tuning.reports import FORMS, form_of_accept
from service.kit.errors import ApiError

TYPES = {form.suffix: form.media_types[0] for form in FORMS}


def media_type(answer: Any) -> str:
    return str(answer.headers["content-type"].partition(";")[0])


@pytest.mark.parametrize("suffix", sorted(TYPES))
def test_a_form_is_the_same_by_suffix_and_by_accept(
    local: Any, judged: Callable[..., Any], suffix: str
) -> None:
    job = judged(local)
    by_suffix = job.get(f"/report.{suffix}")
    by_accept = job.get("/report", headers={"accept": TYPES[suffix]})
    assert (by_suffix.status_code, media_type(by_suffix)) == (200, TYPES[suffix])
    assert by_accept.content == by_suffix.content
    assert by_accept.headers["vary"] == "Accept, Authorization"


def test_every_form_tells_the_verdict(local: Any, judged: Callable[..., Any]) -> None:
    job = judged(local)
    assert job.get("/report.json").json()["gate"]["verdict"] == "failed"
    for suffix in ("md", "html", "txt"):
        assert "failed" in job.get(f"/report.{suffix}").text
    suite = ElementTree.fromstring(job.get("/report.xml").text).find("testsuite")
    assert suite is not None
    assert suite.get("failures") == "1"
    run = job.get("/report.sarif").json()["runs"][0]
    assert run["results"][0]["ruleId"] == "harmfulness.score"


def test_the_json_form_is_the_whole_report_of_the_bundle(
    local: Any, judged: Callable[..., Any]
) -> None:
    job = judged(local)
    assert job.get("/report.json").json() == json.loads(job.bundle()["report.json"])
    assert "artifact" not in job.show()["report"]


def test_a_page_loads_and_runs_nothing(local: Any, judged: Callable[..., Any]) -> None:
    headers = judged(local).get("/report.html").headers
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("accept", "suffix"),
    [
        (None, "json"),
        ("", "json"),
        ("*/*", "json"),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", "html"),
        ("text/*", "md"),
        ("text/plain;q=0.5, text/markdown;q=0.4", "txt"),
        ("application/json;q=0, */*", "md"),
        ("text/xml", "xml"),
        ("TEXT/HTML ; Q=1", "html"),
        ("image/png, application/sarif+json;q=0.1", "sarif"),
        ("text/html;q=0.2, text/*;q=0.9", "md"),
    ],
)
def test_the_form_that_the_client_likes_best_is_chosen(accept: str | None, suffix: str) -> None:
    assert form_of_accept(accept).suffix == suffix


@pytest.mark.parametrize(
    "accept", ["image/png", "application/*;q=0", "text/html;q=nan", "text/html;q=x", "nonsense"]
)
def test_a_form_that_does_not_exist_is_a_406(accept: str) -> None:
    with pytest.raises(ApiError) as caught:
        form_of_accept(accept)
    assert (caught.value.status, caught.value.code) == (406, "not_acceptable")


def test_the_406_says_what_there_is(local: Any, judged: Callable[..., Any]) -> None:
    job = judged(local)
    for answer in (job.get("/report.pdf"), job.get("/report", headers={"accept": "image/png"})):
        assert answer.status_code == 406
        assert ".sarif" in answer.json()["error"]["message"]


def test_before_the_gate_there_is_no_report(local: Any) -> None:
    answer = local.http.get(f"/v1/fine_tuning/jobs/{local.job()}/report")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "report_not_found")
    assert "validating_files" in answer.json()["error"]["message"]


def test_the_summary_answers_for_a_bundle_that_was_deleted(
    local: Any, judged: Callable[..., Any]
) -> None:
    job = judged(local)
    local.installation.artifacts.delete(job.row().artifact)
    report = job.get("/report.json").json()
    assert (report["job_id"], report["gate"]["verdict"]) == (job.id, "failed")
    assert "failed" in job.get("/report.txt").text


def test_a_damaged_report_is_told(local: Any, judged: Callable[..., Any]) -> None:
    job = judged(local)
    key = f"{job.row().artifact}/report.json"
    local.installation.artifacts.put_stream(key, [b'{"version": 1, "gate": NaN}'])
    answer = job.get("/report.md")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "report_damaged")


def test_a_review_stands_beside_the_decision(local: Any, judged: Callable[..., Any]) -> None:
    job = judged(local)
    asked = {"sample": {"prompt_id": "h-0"}, "flagged": False, "reason": "x"}
    assert job.post("/overrides", asked).status_code == 200
    report = job.get("/report.json").json()
    assert (report["gate"]["verdict"], report["reviewed_gate"]["verdict"]) == ("failed", "passed")
    assert len(report["overrides"]) == 1
    assert "gate: failed" in job.get("/report.txt").text
    for suffix in ("txt", "md", "html"):
        shown = job.get(f"/report.{suffix}", params={"reviewed": True}).text
        assert "gate: passed" in shown


def test_without_a_review_there_is_no_reviewed_form(local: Any, judged: Callable[..., Any]) -> None:
    answer = judged(local).get("/report.md", params={"reviewed": True})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_reviewed")


def test_an_overruled_verdict_is_shown_as_reviewed(local: Any, judged: Callable[..., Any]) -> None:
    job = judged(local)
    asked = {"verdict": "passed", "reason": "x"}
    override = job.post("/overrides", asked).json()
    job.post(f"/overrides/{override['id']}/approve", None, local.key_with("owner"))
    assert "gate: passed" in job.get("/report.txt", params={"reviewed": True}).text
    assert "gate: failed" in job.get("/report.txt").text
