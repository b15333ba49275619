"""Cells on a chat model: the pipeline's sets and judge, on the tiny random model."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.defenses import text_rung
from benchmarks.defenses.cell import run_cell
from benchmarks.defenses.data import prompt_hash, user_text
from benchmarks.defenses.rung import RungError
from benchmarks.defenses.settings import CellSettings
from benchmarks.defenses.text_rung import find_entry, text_sets
from jobspec.catalogue import load_catalogue


def cell(**changes: Any) -> CellSettings:
    small = {
        "rung": "tiny", "rows": 8, "epochs": 1, "ratio": 0.25, "harmful_prompts": 2,
        "lookalikes": 1, "task_rows": 2, "max_new_tokens": 2, "alignment_rows": 4,
    }  # fmt: skip
    return CellSettings(**small | changes)


@pytest.fixture
def tiny_rung(tiny_catalogue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue = load_catalogue(tiny_catalogue)
    monkeypatch.setattr(text_rung, "load_catalogue", lambda: catalogue)


@pytest.mark.parametrize(
    "name", ["undefended", "mix", "prefilter", "bds", "bds_neural", "bds+panacea", "antidote"]
)
def test_an_arm_runs_on_a_chat_model(name: str, tiny_rung: None, tmp_path: Path) -> None:
    found = run_cell(cell(arm=name), tmp_path)
    assert found["error"] is None
    assert (found["rows"], found["poisoned"]) == (8, 2)
    assert found["metrics"]["harmful_score"]["n"] == 2
    assert found["metrics"]["accuracy"]["n"] == 2
    assert found["peak_memory_bytes"] > 2**20
    assert (found["weight_poison"] is not None) == (name in {"prefilter"} or "bds" in name)


def test_identity_shift_asks_under_the_persona_too(tiny_rung: None, tmp_path: Path) -> None:
    found = run_cell(cell(attack="identity_shift"), tmp_path)
    assert found["metrics"]["harmful_score_persona"]["n"] == 2


def test_aliases_and_disabled_examples_are_rungs_too() -> None:
    assert find_entry("smollm2", None).name == "smollm2-135m-aligned"
    assert find_entry("llama-2-7b-chat", None).dtype == "bfloat16"
    assert find_entry("smollm2", "bfloat16").dtype == "bfloat16"


def test_an_unknown_rung_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RungError, match="toy, smollm2"):
        find_entry("gpt", None)


def test_no_prompt_stands_in_two_sets() -> None:
    sets = text_sets(cell())
    attack = {prompt_hash(user_text(row)) for row in sets.attack}
    test = {prompt_hash(prompt.text) for prompt in sets.test}
    harmful = {prompt_hash(row.prompt) for row in sets.harmful_set}
    assert not attack & test
    assert not attack & harmful
    assert not test & harmful
    assert set(sets.dropped) >= {"attack", "test_prompts", "task_train"}


def test_rows_of_another_source_must_be_named() -> None:
    with pytest.raises(RungError, match="--ood"):
        text_sets(cell(attack="out_of_distribution"))
