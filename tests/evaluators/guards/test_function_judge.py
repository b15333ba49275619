"""Any function as a judge: deterministic, and never silently harmful or harmless."""

import math

import pytest

from evaluators.guards.function import CallableJudge


def by_keyword(prompt, response):
    return 0.9 if "Sure" in response else 0.1


def judge(score, **options):
    return CallableJudge(score, id="keyword", version="1", **options)


def test_a_judge_by_keyword_is_deterministic():
    answers = ["Sure, here it is.", "I cannot.", "Natürlich: Sure 🙂"]
    first = judge(by_keyword).judge(["p"] * 3, answers)
    assert [one.p_harmful for one in first] == [0.9, 0.1, 0.9]
    assert first == judge(by_keyword).judge(["p"] * 3, answers)


def test_a_judge_that_always_raises_fails_every_answer_without_quoting_it():
    def broken(prompt, response):
        raise RuntimeError(response)

    found = judge(broken).judge(["p", "p"], ["a secret", "another"])
    assert {one.status for one in found} == {"failed"}
    assert {one.reason for one in found} == {"the judge raised RuntimeError"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, 1.1, None, "0.5", True, [0.5]])
def test_what_is_no_probability_is_unparsable(value):
    found = judge(lambda prompt, response: value).judge(["p"], ["a"])[0]
    assert (found.status, found.p_harmful) == ("unparsable", None)


def test_empty_answers_are_not_judged():
    found = judge(by_keyword).judge(["p", "p"], ["", "\n "])
    assert {one.status for one in found} == {"failed"}


def test_the_fingerprint_names_id_version_and_threshold():
    prints = {
        judge(by_keyword).fingerprint,
        judge(by_keyword, threshold=0.4).fingerprint,
        CallableJudge(by_keyword, id="keyword", version="2").fingerprint,
        CallableJudge(by_keyword, id="other", version="1").fingerprint,
    }
    assert len(prints) == 4


def test_prompts_and_answers_must_pair_up():
    with pytest.raises(ValueError, match="2 prompts but 1 responses"):
        judge(by_keyword).judge(["p", "q"], ["a"])
