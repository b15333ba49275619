"""The protocol of a judge in a process of its own."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from evaluators.harmfulness.contract import Judgement
from evaluators.harmfulness.serve import serve


class LengthJudge:
    """Judges by the length of the answer."""

    id = "length"
    version = "2"
    threshold = 0.5
    fingerprint = "0" * 64
    hosts: tuple[str, ...] = ()
    card: Mapping[str, Any] = {}

    def judge(self, prompts: Sequence[str], responses: Sequence[str]) -> list[Judgement]:
        pairs = zip(prompts, responses, strict=True)
        return [Judgement(p_harmful=len(response) / 10) for _, response in pairs]


def said(*lines: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    serve(LengthJudge(), encoded, messages.append)
    return messages


def test_the_judge_is_named_before_anything_is_asked() -> None:
    assert said() == [{"ready": {"id": "length", "version": "2", "threshold": 0.5}}]


def test_every_line_has_an_answer_in_its_order() -> None:
    _, first, second = said(
        {"prompts": ["", ""], "responses": ["a", "abc"]}, {"prompts": [], "responses": []}
    )
    assert [item["p_harmful"] for item in first["judgements"]] == [0.1, 0.3]
    assert second == {"judgements": []}


def test_a_line_that_cannot_be_judged_ends_nothing() -> None:
    asked = {"prompts": [""], "responses": ["a"]}
    _, *answers = said(b"not JSON", {"prompts": [""]}, {"prompts": [], "responses": ["a"]}, asked)
    assert [answer.get("error") for answer in answers[:3]] == [
        "JSONDecodeError",
        "KeyError",
        "ValueError",
    ]
    assert answers[3]["judgements"][0]["status"] == "judged"
