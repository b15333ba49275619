"""A trained scorer reads a file: its own job's ranks again, and clear words where it cannot."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from defenses.bds.neural import load_scorer, save_scorer
from defenses.bds.scorers import CausalLmScorer, EmbeddingScorer, TokenScorer
from jobspec.chat import read_chat_rows
from jobspec.preference import read_preference_rows
from workers.pipeline.entry import EXIT_FAILED, EXIT_STOPPED, guarded
from workers.pipeline.failure import PipelineFailure, Stopped
from workers.pipeline.features import token_features, tokenizer_fingerprint
from workers.pipeline.run import run_job
from workers.pipeline.score_rows import ROWS_PER_PART, score_file

Score = Callable[..., dict[str, Any]]


@pytest.fixture
def score(tiny_catalogue: Path, tmp_path: Path) -> Score:
    """score_file with the tiny catalogue; the weights go to out.parquet."""

    def call(folder: Path, source: Path, **changes: Any) -> dict[str, Any]:
        options: dict[str, Any] = {
            "out": tmp_path / "out.parquet",
            "model": None,
            "catalogue": tiny_catalogue,
            "cache_dir": tmp_path / "cache",
            "progress": lambda done, total: None,
        }
        return score_file(folder, source, **options | changes)

    return call


@pytest.fixture(scope="module")
def tokenizer(tiny_model_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model_folder)


@pytest.fixture
def token_scorer(tokenizer: Any, tmp_path: Path) -> Path:
    """An untrained scorer of the tiny model's tokens."""
    scorer = TokenScorer(258, torch.Generator().manual_seed(5))
    fingerprint = tokenizer_fingerprint(tokenizer)
    save_scorer(tmp_path / "scheduler", scorer, tokenizer=fingerprint, transform="softmax")
    return tmp_path / "scheduler"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", 15)


def write_rows(path: Path, count: int) -> Path:
    def turns(index: int) -> list[dict[str, str]]:
        question = {"role": "user", "content": f"question {index}" + "?" * (index % 7)}
        return [question, {"role": "assistant", "content": ("yes", "no")[index % 2]}]

    path.write_text("".join(json.dumps({"messages": turns(i)}) + "\n" for i in range(count)))
    return path


def columns(path: Path) -> dict[str, list[Any]]:
    return pq.read_table(path).to_pydict()


def never() -> bool:
    return False


@pytest.mark.parametrize(
    ("kind", "transform"),
    [("embedding", "softmax"), ("tokens", "sigmoid"), ("causal_lm", "softmax")],
)
def test_a_job_s_training_file_gets_the_ranks_of_the_job_again(
    make_spec: Any, recorder: Any, score: Score, tmp_path: Path, kind: str, transform: str
) -> None:
    # Without rescoring the weights at the end are those of the last step.
    options = {"name": "bds", "form": "neural", "scorer": kind, "transform": transform,
               "rescore": False}  # fmt: skip
    spec = make_spec(
        hyperparameters={"n_epochs": 1, "batch_size": 4},
        defense={
            "scheduler": {**options, "alignment_rows": 12},
            "perturbation": {"mode": "none"},
        },
    )
    report = run_job(spec, tmp_path / "work", recorder, never)
    bundle = tmp_path / "work" / "bundle"
    found = score(bundle / "scheduler", spec.training_file)
    trained, scored = columns(bundle / "safety_weights.parquet"), columns(tmp_path / "out.parquet")
    assert list(scored) == ["row", "line", "logit", "weight", "rank"]
    for name in ("row", "line", "rank"):
        assert scored[name] == trained[name]
    for name in ("logit", "weight"):
        assert scored[name] == pytest.approx(trained[name], abs=1e-5)
    told = report["defense"]["scheduler"]
    assert [row["line"] for row in found["least_trusted"]] == [
        row["line"] for row in told["distrusted"][:10]
    ]
    assert found["effective_sample_size"] == pytest.approx(told["effective_sample_size"], abs=1e-5)
    assert (found["scorer"], found["transform"]) == (kind, transform)


def test_weights_have_mean_1_and_rank_1_has_the_least(
    score: Score, token_scorer: Path, rows: Path, tmp_path: Path
) -> None:
    found = score(token_scorer, rows)
    scored = columns(tmp_path / "out.parquet")
    assert sum(scored["weight"]) == pytest.approx(15)
    by_rank = sorted(zip(scored["rank"], scored["weight"], scored["line"], strict=True))
    assert [weight for _, weight, _ in by_rank] == sorted(scored["weight"])
    assert [row["line"] for row in found["least_trusted"]] == [line for *_, line in by_rank[:10]]
    assert "no verdict" in found["note"]


def test_a_causal_model_scores_rows_too(
    score: Score, tiny_model_folder: Path, tokenizer: Any, rows: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    scorer = CausalLmScorer(model, torch.Generator().manual_seed(5))
    features = token_features(read_chat_rows(rows)[0], tokenizer)
    save_scorer(tmp_path / "scheduler", scorer, tokenizer=features.tokenizer, transform="softmax")
    score(tmp_path / "scheduler", rows)
    with torch.no_grad():
        expected = scorer(features)
    assert columns(tmp_path / "out.parquet")["logit"] == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_preference_row_is_scored_by_its_preferred_answer(
    score: Score, token_scorer: Path, tokenizer: Any, tmp_path: Path
) -> None:
    def pair(index: int) -> dict[str, Any]:
        question = {"role": "user", "content": f"question {index}"}
        return {
            "input": {"messages": [question]},
            "preferred_output": [{"role": "assistant", "content": "yes" * (index + 1)}],
            "non_preferred_output": [{"role": "assistant", "content": "no"}],
        }

    source = tmp_path / "pairs.jsonl"
    source.write_text("".join(json.dumps(pair(index)) + "\n" for index in range(3)))
    score(token_scorer, source)
    features = token_features(read_preference_rows(source)[0], tokenizer)
    with torch.no_grad():
        expected = load_scorer(token_scorer, features.tokenizer)(features)
    assert columns(tmp_path / "out.parquet")["logit"] == pytest.approx(expected.tolist(), abs=1e-6)


def test_a_file_of_several_parts_is_normalised_as_one(
    score: Score, token_scorer: Path, tmp_path: Path
) -> None:
    count = ROWS_PER_PART + 3
    seen: list[tuple[int, int]] = []
    source = write_rows(tmp_path / "many.jsonl", count)
    score(token_scorer, source, progress=lambda done, total: seen.append((done, total)))
    scored = columns(tmp_path / "out.parquet")
    expected = count * torch.softmax(torch.tensor(scored["logit"], dtype=torch.float64), dim=0)
    assert scored["weight"] == pytest.approx(expected.tolist())
    assert sorted(scored["rank"]) == list(range(1, count + 1))
    assert seen == [(0, count), (ROWS_PER_PART, count)]


def test_a_bundle_stands_for_its_scheduler_folder(
    score: Score, token_scorer: Path, rows: Path, tmp_path: Path
) -> None:
    score(token_scorer, rows)
    score(token_scorer.parent, rows, out=tmp_path / "again.parquet")
    assert columns(tmp_path / "again.parquet") == columns(tmp_path / "out.parquet")


def test_a_stopped_run_leaves_no_file(
    score: Score, token_scorer: Path, rows: Path, recorder: Any, tmp_path: Path
) -> None:
    def stopped(_done: int, _total: int) -> None:
        raise Stopped

    code = guarded(lambda: score(token_scorer, rows, progress=stopped), recorder)
    assert code == EXIT_STOPPED
    assert not (tmp_path / "out.parquet").exists()


def test_a_scorer_of_other_tokens_says_which_model_was_asked(
    score: Score, rows: Path, tmp_path: Path
) -> None:
    scorer = TokenScorer(9, torch.Generator().manual_seed(5))
    save_scorer(tmp_path / "scheduler", scorer, tokenizer="vocabulary:0", transform="softmax")
    with pytest.raises(PipelineFailure, match=r"vocabulary:0.*those of tiny.*--model") as caught:
        score(tmp_path / "scheduler", rows)
    assert caught.value.code == "invalid_spec"


def test_a_scorer_of_another_embedder_is_refused(score: Score, rows: Path, tmp_path: Path) -> None:
    scorer = EmbeddingScorer(4, torch.Generator().manual_seed(5))
    save_scorer(tmp_path / "scheduler", scorer, tokenizer="other/embedder", transform="softmax")
    with pytest.raises(PipelineFailure, match=r"other/embedder.*all-MiniLM-L6-v2"):
        score(tmp_path / "scheduler", rows)


def test_a_model_outside_the_catalogue_is_named(
    score: Score, token_scorer: Path, rows: Path
) -> None:
    with pytest.raises(PipelineFailure, match=r"large is not in the catalogue\. Known: tiny"):
        score(token_scorer, rows, model="large")


def test_a_folder_that_is_not_there_is_named(score: Score, rows: Path, tmp_path: Path) -> None:
    with pytest.raises(PipelineFailure, match="gone: no such folder"):
        score(tmp_path / "gone", rows)


def test_a_folder_without_a_scorer_is_told_in_words(
    score: Score, rows: Path, tmp_path: Path, recorder: Any
) -> None:
    assert guarded(lambda: score(tmp_path, rows), recorder) == EXIT_FAILED
    failure = recorder.of("failure")[0]
    assert failure["code"] == "invalid_spec"
    assert "holds no scorer" in failure["message"]


@pytest.mark.parametrize(
    ("description", "words"),
    [
        ("broken", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"kind": "oracle", "transform": "softmax"}', "does not know"),
        ('{"kind": "tokens", "transform": "softmax"}', "no complete scorer"),
    ],
)
def test_a_damaged_description_is_told_in_words(
    score: Score, token_scorer: Path, rows: Path, description: str, words: str
) -> None:
    (token_scorer / "scorer.json").write_text(description)
    with pytest.raises(PipelineFailure, match=words):
        score(token_scorer, rows)


def test_weights_that_are_no_numbers_are_refused(
    score: Score, token_scorer: Path, rows: Path, tmp_path: Path
) -> None:
    path = token_scorer / "scorer.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"head.bias": torch.full((1,), float("nan"))}, path)
    with pytest.raises(PipelineFailure, match="line 1 no finite logit"):
        score(token_scorer, rows)
    assert not (tmp_path / "out.parquet").exists()


def test_every_bad_line_is_named(score: Score, token_scorer: Path, rows: Path) -> None:
    lines = rows.read_text().splitlines()
    lines[2], lines[6] = '{"messages": []}', "no JSON"
    rows.write_text("\n".join(lines) + "\n")
    with pytest.raises(PipelineFailure, match="Line 3: ") as caught:
        score(token_scorer, rows)
    assert caught.value.code == "invalid_training_file"
    assert [detail.split(":")[0] for detail in caught.value.details] == ["Line 3", "Line 7"]


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_refused(
    score: Score, token_scorer: Path, rows: Path, content: str
) -> None:
    rows.write_text(content)
    with pytest.raises(PipelineFailure, match="The file is empty") as caught:
        score(token_scorer, rows)
    assert caught.value.code == "invalid_training_file"


def test_a_file_that_is_not_there_is_named(
    score: Score, token_scorer: Path, tmp_path: Path
) -> None:
    with pytest.raises(PipelineFailure, match=r"gone\.jsonl: no such file"):
        score(token_scorer, tmp_path / "gone.jsonl")


def test_an_existing_file_is_never_overwritten(
    score: Score, token_scorer: Path, rows: Path
) -> None:
    before = rows.read_bytes()
    with pytest.raises(PipelineFailure, match="exists already"):
        score(token_scorer, rows, out=rows)
    assert rows.read_bytes() == before


def test_a_missing_folder_of_the_output_is_named(
    score: Score, token_scorer: Path, rows: Path, tmp_path: Path
) -> None:
    with pytest.raises(PipelineFailure, match="nowhere: no such folder"):
        score(token_scorer, rows, out=tmp_path / "nowhere" / "out.parquet")
