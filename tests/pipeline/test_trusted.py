"""The service's own sets: which rows a job gets, and under which system turns."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from jobspec.chat import ChatMessage, ChatRow
from jobspec.hyperparameters import ResolvedHyperparameters
from jobspec.preference import PreferenceRow
from jobspec.spec import JobSpec
from workers.pipeline.failure import PipelineFailure
from workers.pipeline.models import LoadedModel
from workers.pipeline.pairs import packaged, pair_rows
from workers.pipeline.rows import TokenRow, encode_row, prompt_response_row
from workers.pipeline.trusted import (
    AlignmentSet,
    SystemTurns,
    adopt,
    alignment_rows,
    harmful_canaries,
    harmful_rows,
    system_turns,
    template_mismatch,
)

HYPER = ResolvedHyperparameters(n_epochs=1, batch_size=4, learning_rate_multiplier=1.0)
BRIEF, LONG = "Answer in one word.", "Be polite. " * 60


@pytest.fixture(scope="module")
def base(tiny_model_folder: Path) -> LoadedModel:
    """Only the tokenizer is read here."""
    return LoadedModel(None, AutoTokenizer.from_pretrained(tiny_model_folder), "tiny")


@pytest.fixture(scope="module")
def refusals() -> list[ChatRow]:
    return pair_rows(packaged("alignment_refusals.jsonl"))


def user_rows(count: int, system: str | None = None, first_line: int = 1) -> list[ChatRow]:
    opening = () if system is None else (ChatMessage("system", system, False),)
    return [
        ChatRow(
            line,
            (
                *opening,
                ChatMessage("user", f"message {line}", False),
                ChatMessage("assistant", "yes", True),
            ),
        )
        for line in range(first_line, first_line + count)
    ]


Aligned = Callable[..., AlignmentSet]


@pytest.fixture
def aligned(make_spec: Callable[..., JobSpec], base: LoadedModel) -> Aligned:
    def build(
        user: Sequence[Any], scheduler: dict[str, Any] | None = None, **options: Any
    ) -> AlignmentSet:
        chosen = scheduler or {"name": "bds", "alignment_rows": 40}
        spec = make_spec(defense={"scheduler": chosen, "perturbation": {"mode": "none"}})
        tokens = [encode_row(base.tokenizer, row, 2048) for row in user if isinstance(row, ChatRow)]
        return alignment_rows(spec, base, user, tokens, HYPER, **options)

    return build


def text(base: LoadedModel, row: TokenRow) -> str:
    return str(base.tokenizer.decode(row.ids))


def pairs_file(path: Path, prompts: Sequence[str]) -> Path:
    path.write_text(
        "".join(json.dumps({"prompt": prompt, "response": "No."}) + "\n" for prompt in prompts)
    )
    return path


def test_a_third_of_the_set_are_refusals(
    aligned: Aligned, base: LoadedModel, refusals: list[ChatRow]
):
    found = aligned(user_rows(12))
    prompts = [row.messages[0].content for row in refusals]
    asked = [
        any(f"user\n{prompt}<|im_end|>" in text(base, row) for prompt in prompts)
        for row in found.rows
    ]
    assert (len(found.rows), found.wanted) == (40, 40)
    assert asked == ([True, False, False] * 14)[:40]


@pytest.mark.parametrize("name", ["mix", "lisa", "seal"])
def test_every_method_with_an_alignment_set_gets_one(aligned: Aligned, name: str):
    assert len(aligned(user_rows(12), {"name": name, "alignment_rows": 10}).rows) == 10


@pytest.mark.parametrize("name", ["none", "prefilter", "constrained_sft"])
def test_a_method_without_an_alignment_set_gets_none(aligned: Aligned, name: str):
    assert aligned(user_rows(12), {"name": name}) == AlignmentSet([], 0)


def test_more_rows_than_the_stock_has_are_said_to_be_wanted(aligned: Aligned):
    found = aligned(user_rows(1200), {"name": "bds", "alignment_rows": 1200})
    assert found.wanted == 1200
    assert len(found.rows) == 3 * 364


def test_the_set_depends_on_the_seed_alone(aligned: Aligned):
    assert aligned(user_rows(12)) == aligned(user_rows(12, first_line=50))


def test_rows_that_the_tenant_asks_too_are_left_out_and_replaced(
    aligned: Aligned, base: LoadedModel, refusals: list[ChatRow]
):
    prompt = refusals[3].messages[0].content
    same = prompt_response_row(77, f"  {prompt.upper()}\n", "Sure.")
    found = aligned([*user_rows(12), same], {"name": "bds", "alignment_rows": 1000})
    assert (found.overlap_left_out, found.overlap_lines) == (1, (77,))
    assert not any(prompt in text(base, row) for row in found.rows)
    assert len(found.rows) == found.wanted


def test_a_later_turn_of_a_conversation_overlaps_too(aligned: Aligned, refusals: list[ChatRow]):
    row = user_rows(1, first_line=5)[0]
    asked = ChatMessage("user", refusals[0].messages[0].content, False)
    answer = ChatMessage("assistant", "Sure.", True)
    later = row._replace(messages=(*row.messages, asked, answer))
    assert aligned([later]).overlap_lines == (5,)


def test_a_file_of_the_alignment_prompts_ends_the_job_with_a_reason(
    aligned: Aligned, refusals: list[ChatRow]
):
    with pytest.raises(PipelineFailure, match="alignment set overlaps") as caught:
        aligned(refusals)
    assert (caught.value.code, caught.value.param) == ("invalid_spec", "training_file")


def test_a_preference_row_overlaps_by_the_question_it_asks(
    aligned: Aligned, refusals: list[ChatRow]
):
    row = PreferenceRow(
        9,
        (refusals[0].messages[0],),
        ChatMessage("assistant", "Sure.", True),
        ChatMessage("assistant", "No.", True),
    )
    assert aligned([row]).overlap_lines == (9,)


def test_an_operators_own_file_replaces_the_stock(
    aligned: Aligned, base: LoadedModel, tmp_path: Path
):
    path = pairs_file(tmp_path / "own.jsonl", ["first question", "second question"])
    found = aligned(user_rows(12), alignment_file=path)
    assert {"first" in text(base, row) for row in found.rows} == {True, False}
    assert (len(found.rows), found.wanted) == (2, 40)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no rows"),
        ("\n\n", "no rows"),
        ('{"prompt": "a"}\n', "line 1: expected a JSON object"),
        ('{"prompt": "a", "response": "b"}\nnonsense\n', "line 2: expected"),
        ('{"prompt": "a", "response": " "}\n', "line 1: .*not empty"),
        ('{"prompt": 1, "response": "b"}\n', "line 1: .*must be texts"),
    ],
)
def test_a_bad_alignment_file_is_refused_with_its_line(
    aligned: Aligned, tmp_path: Path, content: str, message: str
):
    path = tmp_path / "own.jsonl"
    path.write_text(content)
    with pytest.raises(PipelineFailure, match=message) as caught:
        aligned(user_rows(12), alignment_file=path)
    assert caught.value.code == "invalid_spec"


def test_a_missing_alignment_file_is_refused(aligned: Aligned, tmp_path: Path):
    with pytest.raises(PipelineFailure, match="cannot be read"):
        aligned(user_rows(12), alignment_file=tmp_path / "none.jsonl")


def test_alignment_rows_carry_system_turns_as_often_as_the_tenants_rows_do(
    aligned: Aligned, base: LoadedModel
):
    user = [*user_rows(3, BRIEF), *user_rows(9, first_line=20)]
    found = aligned(user)
    opened = [text(base, row).startswith(f"<|im_start|>system\n{BRIEF}") for row in found.rows]
    assert sum(opened) == found.system_turns_adopted == 10
    # Refusals and harmless rows alike: otherwise the turn would tell the one from the other.
    assert sum(opened[::3]) == 4


def test_half_of_the_alignment_rows_keep_the_plain_opening(aligned: Aligned):
    assert aligned(user_rows(12, BRIEF)).system_turns_adopted == 20


def test_system_texts_are_taken_in_the_tenants_proportion(base: LoadedModel):
    turns = system_turns([*user_rows(30, "Be brief."), *user_rows(10, "Be kind.")])
    rows = [prompt_response_row(line, f"question {line}", "No.") for line in range(80)]
    found = adopt(base.tokenizer, rows, turns, 512, 3, "rows")
    texts = Counter(row.messages[0].content for row in found.chat)
    assert {name: texts[name] for name in ("Be brief.", "Be kind.")} == {
        "Be brief.": 30,
        "Be kind.": 10,
    }
    assert (found.adopted, found.dropped) == (40, 0)


def test_without_system_turns_nothing_is_adopted(aligned: Aligned):
    found = aligned(user_rows(12))
    assert (found.system_turns_adopted, found.system_turns_dropped) == (0, 0)


def test_a_system_turn_that_makes_a_row_too_long_is_left_away(aligned: Aligned, base: LoadedModel):
    found = aligned(user_rows(12, LONG))
    assert (found.system_turns_adopted, found.system_turns_dropped) == (0, 20)
    assert all("Be polite" not in text(base, row) for row in found.rows)
    assert found.template_differs


def test_a_longer_limit_lets_long_system_turns_be_adopted(aligned: Aligned):
    found = aligned(user_rows(12, LONG), max_length=2048)
    assert (found.system_turns_adopted, found.system_turns_dropped) == (20, 0)
    assert not found.template_differs


def test_a_row_that_fits_in_no_form_names_its_line(base: LoadedModel):
    row = prompt_response_row(8, "a question " * 20, "No.")
    with pytest.raises(PipelineFailure, match="Line 8 of the rows"):
        adopt(base.tokenizer, [row], SystemTurns(0.0, ()), 16, 0, "rows")


def row_of(*ids: int) -> TokenRow:
    return TokenRow(1, ids, ids, False)


@pytest.mark.parametrize(
    ("user", "trusted", "differs"),
    [
        ([(1, 5, 9), (1, 5, 8)], [(1, 5, 7), (1, 5, 6)], False),
        ([(1, 5, 9), (1, 5, 8)], [(1, 6, 9), (1, 6, 8)], True),
        ([(1, 5, 9), (1, 6, 8)], [(1, 6, 9), (1, 6, 8)], False),
        ([(2, 5)], [(1, 5)], True),
        ([], [(1, 5)], False),
        ([(1, 5)], [], False),
    ],
)
def test_sets_that_open_differently_are_told_apart(
    user: list[tuple[int, ...]], trusted: list[tuple[int, ...]], differs: bool
):
    found = template_mismatch([row_of(*ids) for ids in user], [row_of(*ids) for ids in trusted])
    assert found is differs


def test_canaries_and_the_perturbations_rows_are_disjoint_and_make_up_the_stock(
    make_spec: Callable[..., JobSpec], base: LoadedModel
):
    spec = make_spec(defense={"perturbation": {"mode": "post_hoc"}})
    stock = pair_rows(packaged("harmful_compliances.jsonl"))
    planted = harmful_canaries(spec.seed, 20)
    rest = harmful_rows(spec, base, canaries=20)
    taken, left = {row.line for row in planted}, {row.line for row in rest}
    assert len(planted) == 20
    assert not taken & left
    assert taken | left == {row.line for row in stock}


def test_at_most_a_third_of_the_harmful_rows_is_planted():
    stock = pair_rows(packaged("harmful_compliances.jsonl"))
    assert len(harmful_canaries(0, 1000)) == len(stock) // 3


def test_without_canaries_the_perturbation_has_every_row(
    make_spec: Callable[..., JobSpec], base: LoadedModel
):
    spec = make_spec(defense={"perturbation": {"mode": "post_hoc"}})
    stock = pair_rows(packaged("harmful_compliances.jsonl"))
    assert len(harmful_rows(spec, base)) == len(stock)
    assert harmful_canaries(spec.seed, 0) == []


def test_which_rows_are_planted_does_not_depend_on_the_order_of_the_file(tmp_path: Path):
    prompts = [f"question {index}" for index in range(12)]
    one = pairs_file(tmp_path / "one.jsonl", prompts)
    two = pairs_file(tmp_path / "two.jsonl", prompts[::-1])
    planted = [
        {row.messages for row in harmful_canaries(4, 3, harmful_file=path)} for path in (one, two)
    ]
    assert planted[0] == planted[1]
    assert len(planted[0]) == 3
