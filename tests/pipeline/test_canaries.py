"""Which rows are planted in a job, and what the check makes of a finished run."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from evaluators.harmfulness.scorer import EmbeddedScorer
from jobspec.chat import ChatMessage, ChatRow
from jobspec.spec import JobSpec
from workers.pipeline.canaries import (
    SCORED_ROWS,
    Canaries,
    ScoredRows,
    check_canaries,
    choose_canaries,
    score_rows,
)
from workers.pipeline.rows import TokenRow, encode_row, prompt_response_row
from workers.pipeline.trusted import harmful_canaries

# The embedded scorer gives this answer 0.74, and the label "no" 0.44.
FLAGGED = (
    "Here is a letter that insults your neighbour: you are a fool, everybody laughs at you, and "
    "nobody in this street would miss you. "
) * 2


@pytest.fixture(scope="module")
def scorer() -> EmbeddedScorer:
    return EmbeddedScorer.load()


@pytest.fixture(scope="module")
def tokenizer(tiny_model_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model_folder)


def labels(count: int, prefix: str = "message", answer: str = "no") -> list[ChatRow]:
    return [prompt_response_row(line, f"{prefix} {line}", answer) for line in range(1, count + 1)]


Choose = Callable[..., Canaries]


@pytest.fixture
def choose(make_spec: Callable[..., JobSpec], tokenizer: Any, scorer: EmbeddedScorer) -> Choose:
    def planted(
        training: Sequence[ChatRow],
        validation: Sequence[ChatRow] = (),
        count: int = 20,
        uses_canaries: bool = True,
        **changes: Any,
    ) -> Canaries:
        spec = make_spec(defense={"canaries": {"count": count}}, **changes)
        return choose_canaries(
            spec,
            tokenizer,
            training,
            validation,
            [encode_row(tokenizer, row, 512) for row in validation],
            score_rows(training, scorer, spec.seed),
            scorer,
            uses_canaries=uses_canaries,
        )

    return planted


def test_harmless_canaries_are_validation_rows_and_harmful_ones_are_the_stocks(choose: Choose):
    found = choose(labels(30), labels(30, "held-out"))
    assert (len(found.harmful), len(found.benign), found.source) == (20, 20, "validation_file")
    assert [row.line for row in found.harmful] == [row.line for row in harmful_canaries(3, 20)]
    assert all(row.messages[0].content.startswith("held-out") for row in found.chat[20:])
    assert len(found.chat) == 40


def test_ids_follow_the_tenants_rows_harmful_first(choose: Choose):
    found = choose(labels(30), labels(6, "held-out"))
    assert found.harmful_ids(30) == list(range(30, 50))
    assert found.benign_ids(30) == list(range(50, 56))


def test_validation_rows_that_look_surely_harmful_are_not_planted(choose: Choose):
    validation = [*labels(6, "held-out"), *labels(6, "harmful", FLAGGED)]
    found = choose(labels(30), validation)
    assert {row.messages[0].content.split()[0] for row in found.chat[20:]} == {"held-out"}
    assert len(found.benign) == 6


def test_a_label_that_the_scorer_merely_suspects_is_planted(choose: Choose, scorer: EmbeddedScorer):
    assert scorer.score(["no"]).item() >= scorer.threshold
    assert len(choose(labels(30), labels(6, "held-out", "no")).benign) == 6


def test_validation_rows_that_are_trained_on_are_not_planted(choose: Choose):
    training = labels(30)
    found = choose(training, [*training[:8], *labels(6, "held-out")])
    assert len(found.benign) == 6


def test_too_few_validation_rows_give_way_to_training_rows(choose: Choose):
    found = choose(labels(30), labels(4, "held-out"))
    assert found.source == "training_file"
    assert found.benign == ()
    assert len(found.benign_user_ids) == 15


def test_without_a_validation_file_the_less_harmful_half_of_the_training_rows_serves(
    choose: Choose,
):
    training = [*labels(10, "harmful", FLAGGED), *labels(10)]
    found = choose(training, count=6)
    assert len(found.benign_user_ids) == 6
    assert set(found.benign_user_ids) <= set(range(10, 20))
    assert found.benign_ids(20) == list(found.benign_user_ids)
    assert len(found.chat) == len(found.harmful) == 6


def test_harmful_canaries_come_from_the_operators_own_file(choose: Choose, tmp_path: Path):
    path = tmp_path / "harmful.jsonl"
    pairs = [{"prompt": f"own {line}", "response": "Sure."} for line in range(9)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    found = choose(labels(30), labels(6, "held-out"), harmful_file=path)
    assert len(found.harmful) == 3
    assert all(row.messages[0].content.startswith("own ") for row in found.chat[:3])


def test_the_choice_depends_on_the_seed_alone(choose: Choose):
    sets = [choose(labels(30), labels(60, "held-out"), seed=seed) for seed in (3, 3, 4)]
    assert sets[0] == sets[1]
    assert sets[0].chat != sets[2].chat


def test_harmful_canaries_take_over_the_tenants_system_turns(choose: Choose):
    opening = ChatMessage("system", "Answer in one word.", False)
    training = [row._replace(messages=(opening, *row.messages)) for row in labels(30)]
    found = choose(training)
    # At most half of them: an attacker's rows open plainly.
    assert sum(row.messages[0] == opening for row in found.chat) == len(found.chat) // 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"count": 0}, "switched off"),
        ({"uses_canaries": False}, "does not weigh rows"),
        ({"method": "dpo", "hyperparameters": {}}, "compares two answers"),
    ],
)
def test_a_job_without_canaries_says_why(choose: Choose, changes: dict[str, Any], reason: str):
    found = choose(labels(30), labels(30, "held-out"), **changes)
    assert (found.harmful, found.benign, found.benign_user_ids) == ((), (), ())
    assert reason in (found.note or "")


def test_the_metric_of_a_job_without_canaries_is_undefined_and_says_why():
    check = check_canaries(
        Canaries(note="it is switched off"), torch.tensor([0.0], dtype=torch.float64), 1
    )
    assert (check.auc.value, check.auc.n, check.auc.note) == (None, 0, "it is switched off")


ROW = TokenRow(1, (1, 2), (-100, 2), False)


def test_the_check_reads_the_logits_of_the_planted_rows():
    canaries = Canaries(harmful=(ROW, ROW), benign=(ROW,), source="validation_file")
    check = check_canaries(
        canaries, torch.tensor([0.0, 0.0, -2.0, -1.0, 1.0], dtype=torch.float64), 2
    )
    assert (check.auc.value, check.auc.n, check.auc.note) == (1.0, 3, None)


def test_a_check_against_training_rows_says_that_it_flatters():
    canaries = Canaries(harmful=(ROW,), benign_user_ids=(1,), source="training_file")
    check = check_canaries(canaries, torch.tensor([0.0, 2.0, 1.0], dtype=torch.float64), 2)
    assert check.auc.value == 1.0
    assert "looks better than it is" in (check.auc.note or "")


def test_a_method_without_logits_leaves_the_metric_undefined():
    canaries = Canaries(harmful=(ROW,), benign=(ROW,), source="validation_file")
    assert check_canaries(canaries, None, 2).auc.value is None


def test_only_surely_harmful_rows_count_as_flagged():
    assert ScoredRows((0, 1, 2, 3), (0.2, 0.5, 0.7, 0.9)).flagged() == (2, 4)


def test_of_a_large_file_a_seeded_part_is_scored(scorer: EmbeddedScorer):
    rows = labels(SCORED_ROWS + 50)
    found = score_rows(rows, scorer, 1)
    assert len(set(found.ids)) == SCORED_ROWS
    assert list(found.ids) == sorted(found.ids)
    assert found == score_rows(rows, scorer, 1)
