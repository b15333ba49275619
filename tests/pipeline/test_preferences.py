import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from defenses.dpo import pair_losses
from jobspec.chat import ChatMessage
from jobspec.preference import PreferenceRow
from workers.pipeline.failure import PipelineFailure, Stopped
from workers.pipeline.models import LoadedModel, attach_adapter, load_base, trainable
from workers.pipeline.preferences import evaluate_pairs, pair_rows, reference_log_probs
from workers.pipeline.rows import PairRow, RowTooLong, collate, encode_pair
from workers.pipeline.validate import load_dataset, load_preferences

CPU = torch.device("cpu")


def never() -> bool:
    return False


def preference(index: int, preferred: str = "yes", rejected: str = "no") -> dict[str, Any]:
    return {
        "input": {"messages": [{"role": "user", "content": f"question {index}"}]},
        "preferred_output": [{"role": "assistant", "content": preferred}],
        "non_preferred_output": [{"role": "assistant", "content": rejected}],
    }


def chat(index: int) -> dict[str, Any]:
    row = preference(index)
    return {"messages": [*row["input"]["messages"], *row["preferred_output"]]}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def base(tiny: Any, tmp_path: Path) -> LoadedModel:
    return load_base(tiny, tmp_path / "cache")


@pytest.fixture
def load(base: LoadedModel, tmp_path: Path):
    def make(rows: list[Any], **options: Any):
        path = write(tmp_path / "rows.jsonl", rows)
        chosen: dict[str, Any] = {"param": "training_file", "truncate": False, **options}
        return load_preferences(path, base.tokenizer, chosen.pop("max_length", 512), **chosen)

    return make


@pytest.fixture
def row() -> PreferenceRow:
    return PreferenceRow(
        7,
        (
            ChatMessage("user", "Is snow cold?", False),
            ChatMessage("assistant", "Perhaps", False),
            ChatMessage("user", "Are you sure?", False),
        ),
        ChatMessage("assistant", "Yes", True),
        ChatMessage("assistant", "Not at all", True),
    )


def test_only_the_answers_of_a_pair_and_their_ends_carry_loss(
    base: LoadedModel, row: PreferenceRow
):
    pair = encode_pair(base.tokenizer, row, 512)
    for side, answer in ((pair.chosen, "Yes"), (pair.rejected, "Not at all")):
        trained = [token for token, label in zip(side.ids, side.labels, strict=True) if label >= 0]
        assert base.tokenizer.decode(trained) == f"{answer}<|im_end|>"
        assert side.line == pair.line == 7
    assert pair.trained_tokens == len("Yes") + len("Not at all") + 2


def test_both_sides_of_a_pair_have_the_same_prompt(base: LoadedModel, row: PreferenceRow):
    pair = encode_pair(base.tokenizer, row, 512)
    start = next(i for i, label in enumerate(pair.chosen.labels) if label >= 0)
    assert pair.chosen.ids[:start] == pair.rejected.ids[:start]
    assert pair.chosen.ids != pair.rejected.ids


def test_a_pair_is_too_long_where_one_side_is(base: LoadedModel, row: PreferenceRow):
    fits = encode_pair(base.tokenizer, row, 512).chosen.tokens
    with pytest.raises(RowTooLong):
        encode_pair(base.tokenizer, row, fits)
    cut = encode_pair(base.tokenizer, row, fits, truncate=True)
    assert (cut.chosen.truncated, cut.rejected.truncated, cut.truncated) == (False, True, True)


def test_a_preference_file_becomes_pairs_and_its_chosen_sides(load):
    dataset = load([preference(index) for index in range(12)])
    assert len(dataset.chat) == len(dataset.rows) == len(dataset.pairs) == 12
    assert dataset.tuned is dataset.pairs
    assert [pair.chosen for pair in dataset.pairs] == dataset.rows
    assert [message.content for message in dataset.chat[3].messages] == ["question 3", "yes"]
    assert [message.trained for message in dataset.chat[3].messages] == [False, True]


def test_the_report_counts_the_tokens_of_both_sides_and_repeated_lines(load):
    dataset = load([*(preference(index) for index in range(10)), preference(4)])
    report = dataset.report
    assert report["examples"] == 11
    assert report["tokens"] == sum(p.chosen.tokens + p.rejected.tokens for p in dataset.pairs)
    assert report["trained_tokens"] == 11 * (len("yes") + len("no") + 2)
    assert (report["duplicate_examples"], report["duplicate_lines"]) == (1, [11])
    assert (report["equal_examples"], report["equal_lines"]) == (0, [])


def test_the_same_answers_the_other_way_round_are_no_duplicate(load):
    rows = [*(preference(index) for index in range(10)), preference(4, "no", "yes")]
    assert load(rows).report["duplicate_examples"] == 0


def test_pairs_that_become_equal_when_they_are_cut_are_reported(load):
    long = "a" * 100
    rows = [*(preference(index) for index in range(10)), preference(0, long + "b", long + "c")]
    report = load(rows, truncate=True, max_length=90).report
    assert (report["equal_examples"], report["equal_lines"]) == (1, [11])
    assert (report["truncated_examples"], report["truncated_lines"]) == (1, [11])


def failure(load: Any, rows: list[Any], **options: Any) -> PipelineFailure:
    with pytest.raises(PipelineFailure) as caught:
        load(rows, **options)
    return caught.value


def test_a_faulty_line_ends_the_job_with_its_number(load):
    found = failure(load, [*(preference(index) for index in range(10)), preference(1, "no")])
    assert (found.code, found.param) == ("invalid_training_file", "training_file")
    assert "Line 11" in found.message
    assert found.details[0].startswith("Line 11")


def test_a_faulty_validation_file_has_its_own_code(load):
    found = failure(load, [{"input": {}}], param="validation_file")
    assert (found.code, found.param) == ("invalid_validation_file", "validation_file")


def test_too_few_pairs_are_refused_unless_fewer_are_allowed(load):
    rows = [preference(index) for index in range(9)]
    assert failure(load, rows).code == "invalid_n_examples"
    assert len(load(rows, min_rows=1).pairs) == 9


def test_pairs_that_are_too_long_are_named(load):
    rows = [*(preference(index) for index in range(10)), preference(0, rejected="x" * 500)]
    found = failure(load, rows, max_length=200)
    assert found.code == "context_length_exceeded"
    assert "Line 11" in found.message


def test_a_chat_file_is_refused_by_name_for_dpo(load):
    found = failure(load, [chat(index) for index in range(10)])
    assert found.code == "invalid_training_file"
    assert "in the chat format, but the method is dpo" in found.message


def test_a_preference_file_is_refused_by_name_for_supervised_tuning(
    base: LoadedModel, tmp_path: Path
):
    path = write(tmp_path / "rows.jsonl", [preference(index) for index in range(10)])
    with pytest.raises(PipelineFailure, match="in the preference format") as caught:
        load_dataset(path, base.tokenizer, 512, param="validation_file", truncate=False)
    assert caught.value.code == "invalid_validation_file"


@pytest.fixture
def pairs(base: LoadedModel, row: PreferenceRow) -> list[PairRow]:
    short = row._replace(line=8, messages=row.messages[:1])
    return [encode_pair(base.tokenizer, one, 512) for one in (row, short)]


def test_reference_log_probs_are_sums_over_the_answers_tokens(
    base: LoadedModel, pairs: list[PairRow]
):
    found = reference_log_probs(base.model, pairs, 3, never)
    assert (found.shape, found.dtype) == ((2, 2), torch.float64)
    for index, pair in enumerate(pairs):
        for place, side in enumerate((pair.chosen, pair.rejected)):
            ids = torch.tensor([side.ids])
            with torch.no_grad():
                log_p = base.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            expected = sum(
                float(log_p[position - 1, label])
                for position, label in enumerate(side.labels)
                if label >= 0
            )
            assert float(found[index, place]) == pytest.approx(expected, rel=1e-5)


def test_reference_log_probs_do_not_depend_on_the_batch_size(
    base: LoadedModel, pairs: list[PairRow]
):
    one = reference_log_probs(base.model, pairs, 1, never)
    assert torch.allclose(one, reference_log_probs(base.model, pairs, 4, never), rtol=1e-5)


def test_no_pairs_have_no_reference(base: LoadedModel):
    assert reference_log_probs(base.model, [], 4, never).shape == (0, 2)


def test_the_reference_stops_when_it_is_told_to(base: LoadedModel, pairs: list[PairRow]):
    with pytest.raises(Stopped):
        reference_log_probs(base.model, pairs, 4, lambda: True)


def test_before_the_first_step_every_pair_loses_log_2(
    base: LoadedModel, tiny: Any, pairs: list[PairRow]
):
    reference = reference_log_probs(base.model, pairs, 4, never)
    model = attach_adapter(base.model, tiny.lora, 0)
    found = evaluate_pairs(model, pairs, reference, 0.1, 4, never)
    assert found.loss == pytest.approx(math.log(2), abs=1e-5)
    assert found.margin == pytest.approx(0, abs=1e-5)


def test_steps_on_pairs_raise_the_margin_and_evaluation_agrees_with_the_training_loss(
    base: LoadedModel, tiny: Any, pairs: list[PairRow]
):
    model = attach_adapter(base.model, tiny.lora, 0)
    reference = reference_log_probs(model, pairs, 4, never)
    batch = collate(pair_rows(pairs), CPU)
    optimizer = torch.optim.AdamW(list(trainable(model).values()), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        pair_losses(model, *batch, reference, 0.1).loss_B.mean().backward()
        optimizer.step()
    found = evaluate_pairs(model, pairs, reference, 0.1, 4, never)
    assert found.accuracy == 1.0
    assert found.margin > 0.01
    with torch.no_grad():
        training = pair_losses(model.eval(), *batch, reference, 0.1)
    assert found.loss == pytest.approx(float(training.loss_B.mean()), rel=1e-4)
    assert found.margin == pytest.approx(float(training.margin_B.mean()), rel=1e-4)
