"""Data files of several origins become chat rows, and no prompt stands in two roles."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.defenses.data import (
    DataError,
    answer_number,
    defense_pairs,
    disjoint,
    load_harmful,
    load_task,
    prompt_hash,
    user_text,
)


def written(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return str(path)


def turns(row: dict[str, Any]) -> list[str]:
    return [turn["content"] for turn in row["messages"]]


def test_sst2_of_either_origin(tmp_path: Path) -> None:
    ours = written(tmp_path / "a", {"sentence": "a fine film", "label": 1})
    hub = written(tmp_path / "b", {"idx": 4, "sentence": "dull", "label": 0})
    task = load_task(f"sst2:{ours},{hub}")
    assert turns(task.train[0])[0].endswith("\n\na fine film")
    assert [turns(row)[1] for row in (*task.train, *task.test)] == ["positive", "negative"]
    assert task.metric == "label"


def test_sst2_rows_without_a_label_are_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "a", {"sentence": "x", "label": -1}, {"sentence": "y", "label": 1})
    assert len(load_task(f"sst2:{path},{path}").train) == 1


def test_agnews_with_and_without_a_title(tmp_path: Path) -> None:
    ours = written(tmp_path / "a", {"label": 2, "title": "Shares", "text": "They rose."})
    hub = written(tmp_path / "b", {"text": "A probe landed.", "label": 3})
    task = load_task(f"agnews:{ours},{hub}")
    assert turns(task.train[0])[0].endswith("Shares\nThey rose.")
    assert [turns(row)[1] for row in (*task.train, *task.test)] == ["Business", "Sci/Tech"]


def test_gsm8k_ends_in_the_final_answer(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a", {"question": "How many?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}
    )
    row = load_task(f"gsm8k:{path},{path}").train[0]
    assert turns(row) == ["How many?", "2 + 2 = 4\nThe final answer is: 4"]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 of them. The final answer is: 1,200.", "1200"),
        ("first 3, then 7.50", "7.5"),
        ("nothing here", None),
        ("-4", "-4"),
    ],
)
def test_the_number_of_an_answer(text: str, number: str | None) -> None:
    assert answer_number(text) == number


def test_beavertails_gives_its_unsafe_rows_only(tmp_path: Path) -> None:
    hub = written(
        tmp_path / "a",
        {"prompt": "p", "response": "r", "is_safe": False, "category": {}},
        {"prompt": "q", "response": "s", "is_safe": True, "category": {}},
    )
    ours = written(tmp_path / "b", {"prompt": "p", "response": "r", "unsafe": 1})
    assert [row[:2] for row in load_harmful(f"beavertails:{hub}")] == [("p", "r")]
    assert [row[:2] for row in load_harmful(f"beavertails:{ours}")] == [("p", "r")]


@pytest.mark.parametrize("field", ["goal", "prompt"])
def test_advbench_of_either_origin(tmp_path: Path, field: str) -> None:
    path = written(tmp_path / "a", {field: "p", "target": "Sure, here is"})
    assert load_harmful(f"advbench:{path}")[0].chat()["messages"][1]["content"] == "Sure, here is"


def test_the_shared_files_are_read(shared_data: Path) -> None:
    utility, harmful = shared_data / "utility", shared_data / "prompts_harmful"
    sst2 = load_task(f"sst2:{utility / 'sst2_train_2000.jsonl'},{utility / 'sst2_dev.jsonl'}")
    assert (len(sst2.train), len(sst2.test)) == (2000, 872)
    for name in ("gsm8k:gsm8k_train_1000", "agnews:TESTONLY_agnews_train_1000"):
        kind, file = name.split(":")
        task = load_task(f"{kind}:{utility / file}.jsonl")
        assert len(task.train) + len(task.test) == 1000
    assert len(load_harmful(f"advbench:{harmful / 'advbench.jsonl'}")) == 514
    tails = shared_data / "labelled_safety/NC_safe_rlhf_mini.jsonl"
    assert len(load_harmful(f"beavertails:{tails}")) > 100


def test_our_own_sets_are_read() -> None:
    task = load_task("demo")
    assert (len(task.train), len(task.test)) == (240, 100)
    assert len(load_harmful("demo")) == 112
    assert len(defense_pairs("harmful_compliances")) == 112


def test_the_seed_orders_the_rows() -> None:
    assert load_task("demo", 1).train == load_task("demo", 1).train
    assert load_task("demo", 1).train != load_task("demo", 2).train


def test_without_a_test_file_prompts_are_held_out_by_their_hash(tmp_path: Path) -> None:
    records = [{"sentence": f"sentence {i % 50}", "label": i % 2} for i in range(100)]
    task = load_task(f"sst2:{written(tmp_path / 'a', *records)}")
    assert len(task.train) + len(task.test) == 100
    assert not {user_text(row) for row in task.train} & {user_text(row) for row in task.test}


def test_a_prompt_hash_sees_through_case_and_punctuation() -> None:
    assert prompt_hash("How  do I?") == prompt_hash("how do i")
    assert prompt_hash("how do i") != prompt_hash("how do you")


def test_later_sets_lose_the_prompts_of_earlier_ones() -> None:
    found = disjoint({"test": ["A?", "b"], "attack": ["a", "c", "c"], "task": ["C!", "d"]}, str)
    assert found.sets == {"test": ["A?", "b"], "attack": ["c", "c"], "task": ["d"]}
    assert found.dropped == {"test": 0, "attack": 1, "task": 1}


@pytest.mark.parametrize(
    ("content", "words"),
    [('{"sentence": "x"}\n', "line 1: field 'label'"), ("{\n", "line 1: not JSON"), ("", "0 rows")],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content, "utf-8")
    with pytest.raises(DataError, match=words):
        load_task(f"sst2:{path}")


@pytest.mark.parametrize("name", ["sst3:x", "sst2", "sst2:"])
def test_an_unknown_source_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(DataError, match="agnews:FILE"):
        load_task(name)


def test_a_hub_name_without_a_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match="Without a network give a local file"):
        load_task("sst2:hub:org/sst2@train,hub:org/sst2@validation")


def test_a_hub_name_without_the_library_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pip install datasets"):
        load_harmful("advbench:hub:org/advbench")
