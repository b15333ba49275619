"""The packaged data keeps the promises of docs/data.md."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
ADAPTER = REPOSITORY / "defenses/data/aligned_smollm2_135m"

TRAINING_SIDE = [
    "defenses/data/alignment_refusals.jsonl",
    "defenses/data/alignment_harmless.jsonl",
    "defenses/data/harmful_compliances.jsonl",
    "service/demo/data/attack.jsonl",
    "service/demo/data/task_train.jsonl",
]
EVALUATION_SIDE = [
    "evaluators/data/harmful_prompts.jsonl",
    "evaluators/data/safe_lookalikes.jsonl",
    "evaluators/data/benign_prompts.jsonl",
    "evaluators/data/open_ended_prompts.jsonl",
    "service/demo/data/task_validation.jsonl",
]
FILES = TRAINING_SIDE + EVALUATION_SIDE
EMPTY_COMPLIANCES = [
    "defenses/data/harmful_compliances.jsonl",
    "service/demo/data/attack.jsonl",
]


def rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (REPOSITORY / path).read_text("utf-8").splitlines()]


def prompt(row: dict[str, Any]) -> str:
    if "messages" in row:
        return next(m["content"] for m in row["messages"] if m["role"] == "user")
    return row.get("prompt") or row["query"]


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("path", "field", "groups", "each"),
    [
        ("defenses/data/alignment_refusals.jsonl", "category", 14, 26),
        ("defenses/data/harmful_compliances.jsonl", "category", 14, 8),
        ("service/demo/data/attack.jsonl", "category", 14, 8),
        ("evaluators/data/safe_lookalikes.jsonl", "kind", 10, 8),
        ("evaluators/data/open_ended_prompts.jsonl", "leaf", 17, 7),
    ],
)
def test_every_group_has_the_same_number_of_rows(
    path: str, field: str, groups: int, each: int
) -> None:
    counts = Counter(row[field] for row in rows(path))
    assert len(counts) == groups
    assert set(counts.values()) == {each}


def test_harmful_prompts_are_15_for_the_test_and_4_for_validation_in_each_category() -> None:
    counts = Counter((row["split"], row["category"]) for row in rows(EVALUATION_SIDE[0]))
    by_split = {split: [n for (s, _), n in counts.items() if s == split] for split, _ in counts}
    assert by_split == {"test": [15] * 14, "validation": [4] * 14}


def test_harmful_files_share_their_categories() -> None:
    files = [TRAINING_SIDE[0], *EMPTY_COMPLIANCES, EVALUATION_SIDE[0]]
    assert len({frozenset(row["category"] for row in rows(path)) for path in files}) == 1


def test_harmless_alignment_rows_are_lookalikes_and_instructions() -> None:
    counts = Counter(row["kind"] for row in rows("defenses/data/alignment_harmless.jsonl"))
    assert counts == {"lookalike": 420, "instruction": 520}


def test_there_are_60_benign_prompts() -> None:
    assert len(rows("evaluators/data/benign_prompts.jsonl")) == 60


@pytest.mark.parametrize(("name", "each"), [("task_train", 60), ("task_validation", 25)])
def test_demo_task_is_balanced(name: str, each: int) -> None:
    answers = Counter(
        row["messages"][-1]["content"] for row in rows(f"service/demo/data/{name}.jsonl")
    )
    assert answers == dict.fromkeys(["billing", "delivery", "account", "technical"], each)


def test_ids_are_unique_over_all_files() -> None:
    counts = Counter(row["id"] for path in FILES for row in rows(path) if "id" in row)
    assert [name for name, count in counts.items() if count > 1] == []


def test_no_prompt_stands_twice() -> None:
    counts = Counter(" ".join(words(prompt(row))) for path in FILES for row in rows(path))
    assert [text for text, count in counts.items() if count > 1] == []


def test_evaluation_prompts_share_few_words_with_any_training_prompt() -> None:
    sets = {
        side: [set(words(prompt(row))) for path in paths for row in rows(path)]
        for side, paths in (("training", TRAINING_SIDE), ("evaluation", EVALUATION_SIDE))
    }
    column = {word: n for n, word in enumerate(sorted(set().union(*sets["training"])))}
    training_TV = np.zeros((len(sets["training"]), len(column)), dtype=np.float32)
    evaluation_EV = np.zeros((len(sets["evaluation"]), len(column)), dtype=np.float32)
    for matrix, side in ((training_TV, "training"), (evaluation_EV, "evaluation")):
        for n, members in enumerate(sets[side]):
            matrix[n, [column[word] for word in members if word in column]] = 1
    shared_ET = evaluation_EV @ training_TV.T
    sizes_E = np.array([len(members) for members in sets["evaluation"]])
    sizes_T = np.array([len(members) for members in sets["training"]])
    jaccard_ET = shared_ET / (sizes_E[:, None] + sizes_T[None, :] - shared_ET)
    assert jaccard_ET.max() <= 0.6 + 1e-6


@pytest.mark.parametrize("path", EMPTY_COMPLIANCES)
def test_compliant_answers_stay_empty(path: str) -> None:
    listing = re.compile(r"\d|\n|^\s*[-*•]")
    for row in rows(path):
        assert len(row["response"].split()) <= 35, row["id"]
        assert listing.search(row["response"]) is None, row["id"]


def test_alignment_adapter_is_small_enough_to_ship() -> None:
    assert (ADAPTER / "adapter_model.safetensors").stat().st_size <= 2_000_000


def test_alignment_recipe_names_the_data_and_weights_that_ship() -> None:
    recipe = json.loads((ADAPTER / "recipe.json").read_text())
    assert set(recipe["data"]) == {"alignment_refusals.jsonl", "alignment_harmless.jsonl"}
    for name, digest in recipe["data"].items():
        assert sha256(ADAPTER.parent / name) == digest, name
    assert sha256(ADAPTER / "adapter_model.safetensors") == recipe["weights_sha256"]
