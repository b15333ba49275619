"""Texts judged by the operator's scorer, in a process of its own."""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx2
import pytest

from jobspec.judging import EmbeddedJudge, ModerationJudge
from service.kit.errors import ApiError
from service.moderations.process import (
    JudgeBusy,
    JudgeProcess,
    JudgeTimeout,
    JudgeUnavailable,
    judge_command,
    judge_environment,
)
from service.moderations.schemas import ModerationRequest
from service.moderations.service import moderate
from service.organizations.permissions import ROLES

# Speaks the protocol of evaluators.harmfulness.serve without a model: the text says what happens.
STAND_IN = """
import json, os, sys, time
def say(message):
    print(json.dumps(message), flush=True)
say({"ready": {"id": "stand-in", "version": "1", "threshold": 0.5}})
for line in sys.stdin:
    request = json.loads(line)
    text = request["responses"][0]
    if text == "crash":
        os._exit(3)
    if text == "sleep":
        time.sleep(60)
    if text == "error":
        say({"error": "ValueError"})
        continue
    say({"judgements": [
        {"p_harmful": None, "status": "failed", "reason": "time-out"} if one == "unknown" else
        {"p_harmful": 0.9 if "bad" in one else 0.1, "status": "judged", "categories": [],
         "input_truncated": False, "pid": os.getpid(), "prompt": prompt}
        for prompt, one in zip(request["prompts"], request["responses"])
    ]})
"""


@pytest.fixture
def make() -> Iterator[Any]:
    """Makes processes of stand-ins, and ends them."""
    made: list[JudgeProcess] = []

    def process(script: str = STAND_IN, **options: Any) -> JudgeProcess:
        made.append(JudgeProcess([sys.executable, "-c", script], {}, **options))
        return made[-1]

    yield process
    for one in made:
        one.close()


def ask(process: JudgeProcess, *texts: str) -> Any:
    return process.ask([""] * len(texts), texts).judgements


def request(**fields: Any) -> ModerationRequest:
    return ModerationRequest.model_validate(fields)


def test_one_process_answers_request_after_request(make: Any) -> None:
    process = make()
    found = [ask(process, "good", "bad")[0]["pid"] for _ in range(3)]
    assert len(set(found)) == 1


def test_requests_at_once_each_get_their_own_answer(make: Any) -> None:
    process = make(waiting=50)
    answers: dict[int, Any] = {}

    def one(number: int) -> None:
        texts = ["bad"] * number + ["good"]
        answers[number] = [item["p_harmful"] for item in ask(process, *texts)]

    threads = [threading.Thread(target=one, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: [0.9] * number + [0.1] for number in range(20)}


def test_a_process_that_crashed_is_started_again(make: Any) -> None:
    process = make()
    first = ask(process, "good")[0]["pid"]
    with pytest.raises(JudgeUnavailable, match="stopped"):
        ask(process, "crash")
    assert ask(process, "good")[0]["pid"] != first


def test_a_process_that_takes_too_long_is_ended(make: Any) -> None:
    process = make(timeout_seconds=1.0)
    first = ask(process, "good")[0]["pid"]
    with pytest.raises(JudgeTimeout, match="1 seconds"):
        ask(process, "sleep")
    assert ask(process, "good")[0]["pid"] != first


def test_no_more_requests_wait_than_may(make: Any) -> None:
    process = make(waiting=1, timeout_seconds=5.0)
    ask(process, "good")

    def sleep() -> None:
        with suppress(JudgeUnavailable):
            ask(process, "sleep")

    slow = threading.Thread(target=sleep)
    slow.start()
    deadline = time.monotonic() + 5
    while not process._turn.locked() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(JudgeBusy):
        ask(process, "good")
    process.close()
    slow.join()


def test_a_request_that_cannot_be_judged_ends_nothing(make: Any) -> None:
    process = make()
    first = ask(process, "good")[0]["pid"]
    with pytest.raises(JudgeUnavailable, match="could not judge"):
        ask(process, "error")
    assert ask(process, "good")[0]["pid"] == first


@pytest.mark.parametrize(
    "script",
    [
        "import sys; sys.exit(1)",
        'print(\'{"error": "the weights are missing"}\')',
        "print('not JSON')",
    ],
)
def test_a_process_that_cannot_start_is_not_tried_again_at_once(make: Any, script: str) -> None:
    process = make(script)
    with pytest.raises(JudgeUnavailable):
        ask(process, "good")
    started = time.monotonic()
    for _ in range(20):
        with pytest.raises(JudgeUnavailable, match="could not be started"):
            ask(process, "good")
    assert time.monotonic() - started < 1


def test_a_closed_process_answers_nobody(make: Any) -> None:
    process = make()
    ask(process, "good")
    process.close()
    with pytest.raises(JudgeUnavailable, match="shutting down"):
        ask(process, "good")


def test_a_command_that_does_not_exist_is_unavailable() -> None:
    with pytest.raises(JudgeUnavailable):
        ask(JudgeProcess(["/nowhere/python"], {}), "good")


def test_the_process_gets_no_secret_of_the_gateway() -> None:
    outside = {"PATH": "/bin", "TUNEGATE_KEY_PEPPER": "s3cret", "TUNEGATE_MODERATION_KEY": "k"}
    assert judge_environment(outside, EmbeddedJudge(), None) == {"PATH": "/bin"}
    remote = ModerationJudge(url="https://judge.example")
    assert judge_environment(outside, remote, 2) == {
        "PATH": "/bin",
        "TUNEGATE_MODERATION_KEY": "k",
        "OMP_NUM_THREADS": "2",
    }


def test_each_text_has_its_result(make: Any) -> None:
    answer = moderate(make(), request(input=["good", "bad"], model="omni-moderation-latest"))
    assert answer.id.startswith("modr-")
    assert answer.model == "stand-in"
    good, bad = answer.results
    assert (good.flagged, good.categories) == (False, {"harmful": False})
    assert (bad.flagged, bad.category_scores) == (True, {"harmful": 0.9})


def test_parts_of_one_text_have_one_result(make: Any) -> None:
    parts = [{"type": "text", "text": "good"}, {"type": "text", "text": "bad"}]
    (result,) = moderate(make(), request(input=parts)).results
    assert result.flagged


def test_the_prompt_reaches_the_judge(make: Any) -> None:
    assert make().ask(["why?"], ["good"]).judgements[0]["prompt"] == "why?"


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"input": "unknown"}, 503, "judgement_failed"),
        ({"input": "crash"}, 503, "moderation_unavailable"),
        ({"input": "good", "model": "gpt-9"}, 404, "model_not_found"),
    ],
)
def test_what_was_not_judged_is_never_called_harmless(
    make: Any, fields: dict[str, Any], status: int, code: str
) -> None:
    with pytest.raises(ApiError) as caught:
        moderate(make(), request(**fields))
    assert (caught.value.status, caught.value.code) == (status, code)


@pytest.fixture
def served(local: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tenant whose gateway's judge is a stand-in."""
    process = JudgeProcess([sys.executable, "-c", STAND_IN], {})
    monkeypatch.setattr(JudgeProcess, "ask", lambda _self, *pairs: _ask(process, *pairs))
    yield local
    process.close()


_ask = JudgeProcess.ask


def test_the_official_client_moderates(served: Any) -> None:
    answer = served.lenient.moderations.create(input="something bad")
    assert (answer.model, answer.results[0].flagged) == ("stand-in", True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": "  \n"}, "input"),
        ({"input": []}, "input"),
        ({"input": ["good", ""]}, "input"),
        ({"input": [1]}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["x"] * 129}, "input"),
        ({"input": [{"type": "image_url", "image_url": {"url": "x"}}]}, "input"),
        ({"input": "x", "colour": 1}, "colour"),
    ],
)
def test_an_input_that_cannot_be_judged_is_named(served: Any, body: Any, param: str) -> None:
    answer = served.http.post("/v1/moderations", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_input_of_many_megabytes_is_a_413(served: Any) -> None:
    answer = served.http.post("/v1/moderations", json={"input": "x" * 2_000_000})
    assert answer.status_code == 413


@pytest.mark.parametrize("role", ROLES)
def test_every_role_may_moderate_and_nobody_without_a_key(served: Any, role: str) -> None:
    url = f"{served.installation.url}/v1/moderations"
    headers = {"authorization": f"Bearer {served.key_with(role)}"}
    assert httpx2.post(url, json={"input": "good"}, headers=headers).status_code == 200
    assert httpx2.post(url, json={"input": "good"}).status_code == 401


def test_the_embedded_scorer_answers_through_its_process() -> None:
    options = EmbeddedJudge()
    process = JudgeProcess(judge_command(options), judge_environment(os.environ, options, 1))
    try:
        answer = moderate(process, request(input=["I can't help with that.", "ü" * 20_000]))
    finally:
        process.close()
    assert answer.model.startswith("embedded")
    assert not answer.results[0].flagged
    assert all(0 <= one.category_scores["harmful"] <= 1 for one in answer.results)
    json.loads(answer.model_dump_json())
