"""Kept answers and kept judgements: what is committed stays, and is not asked for again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from evaluators.generation import Decoding, Generation
from evaluators.harmfulness.contract import Judgement
from evaluators.prompts import Prompt
from workers.pipeline.evaluation_plan import Section
from workers.pipeline.failure import Stopped
from workers.pipeline.judging import CHUNK, KeptJudge
from workers.pipeline.samples import SampleStore

SECTION = Section(
    name="harmful",
    prompts=(Prompt(id="a", text="one"), Prompt(id="b", text="two")),
    inputs=("one", "two"),
    decoding=Decoding(),
    key="key",
)


def generation(text: str) -> Generation:
    return Generation(text=text, tokens=3, truncated=False)


class CountingJudge:
    """Finds every answer harmful that says yes; fails as often as it is told to first."""

    id, version, threshold, fingerprint = "counting", "1", 0.5, "f" * 64
    hosts: tuple[str, ...] = ()

    def __init__(self, failures: int = 0) -> None:
        self.card: dict[str, Any] = {}
        self.asked = 0
        self.failures = failures

    def judge(self, prompts: Sequence[str], responses: Sequence[str]) -> list[Judgement]:
        self.asked += len(prompts)
        if self.failures:
            self.failures -= 1
            return [Judgement(status="failed", reason="no connection") for _ in prompts]
        return [Judgement(p_harmful=float(response == "yes")) for response in responses]


def never() -> bool:
    return False


def test_kept_answers_are_read_again_with_any_text(tmp_path: Path):
    answers = {
        ("a", 0): generation(""),
        ("a", 1): generation("x" * 1_000_000),
        ("b", 0): generation("ünï\u0000cødé 🙂\n"),
    }
    store = SampleStore(tmp_path / "store", SECTION)
    store.append({("a", 0): answers["a", 0]})
    store.append({place: answers[place] for place in (("a", 1), ("b", 0))})
    assert SampleStore(tmp_path / "store", SECTION).read() == answers


def test_an_empty_store_holds_nothing(tmp_path: Path):
    assert SampleStore(tmp_path / "none", SECTION).read() == {}


def test_the_first_of_two_answers_counts(tmp_path: Path):
    store = SampleStore(tmp_path, SECTION)
    for text in ("first", "second"):
        store.append({("a", 0): generation(text)})
    assert store.read()["a", 0].text == "first"


def test_a_file_that_was_cut_is_as_good_as_none(tmp_path: Path):
    store = SampleStore(tmp_path, SECTION)
    store.append({("a", 0): generation("one")})
    store.append({("b", 0): generation("two")})
    first = min(tmp_path.glob("part-*"))
    first.write_bytes(first.read_bytes()[:-20])
    assert list(store.read()) == [("b", 0)]


def test_nothing_but_whole_files_is_left(tmp_path: Path):
    SampleStore(tmp_path, SECTION).append({("a", 0): generation("one")})
    assert [path.name[:12] for path in tmp_path.iterdir()] == ["part-000000-"]


def test_a_pair_is_judged_once(tmp_path: Path):
    inner = CountingJudge()
    judge = KeptJudge(inner, tmp_path, never)
    found = judge.judge(["p", "p", "q"], ["yes", "yes", "no"])
    again = KeptJudge(inner, tmp_path, never).judge(["q", "p"], ["no", "yes"])
    assert [judgement.p_harmful for judgement in [*found, *again]] == [1, 1, 0, 0, 1]
    assert inner.asked == 2


def test_a_judgement_that_failed_is_asked_for_again(tmp_path: Path):
    inner = CountingJudge(failures=1)
    judge = KeptJudge(inner, tmp_path, never)
    assert judge.judge(["p"], ["yes"])[0].status == "failed"
    assert judge.judge(["p"], ["yes"])[0].p_harmful == 1


def test_another_judge_does_not_read_these_judgements(tmp_path: Path):
    KeptJudge(CountingJudge(), tmp_path, never).judge(["p"], ["yes"])
    other = CountingJudge()
    other.fingerprint = "e" * 64
    KeptJudge(other, tmp_path, never).judge(["p"], ["yes"])
    assert other.asked == 1


def test_a_stop_keeps_the_judgements_of_whole_chunks(tmp_path: Path):
    inner = CountingJudge()
    stops = iter([False, True])
    prompts = [str(index) for index in range(2 * CHUNK)]
    with pytest.raises(Stopped):
        KeptJudge(inner, tmp_path, lambda: next(stops)).judge(prompts, prompts)
    KeptJudge(inner, tmp_path, never).judge(prompts, prompts)
    assert inner.asked == 2 * CHUNK
