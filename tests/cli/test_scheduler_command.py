"""`tunegate scheduler score`: a scorer's folder and a file are enough, no service and no job."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

from defenses.bds.neural import save_scorer
from defenses.bds.scorers import TokenScorer
from workers.pipeline.features import tokenizer_fingerprint


@pytest.fixture
def scorer(tiny_model_folder: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "scheduler"
    made = TokenScorer(258, torch.Generator().manual_seed(5))
    fingerprint = tokenizer_fingerprint(AutoTokenizer.from_pretrained(tiny_model_folder))
    save_scorer(folder, made, tokenizer=fingerprint, transform="softmax")
    return folder


def test_the_ten_least_trusted_lines_are_shown(
    cli: Any, scorer: Path, chat_file: Path, tiny_catalogue: Path, tmp_path: Path
) -> None:
    out = tmp_path / "weights.parquet"
    done = cli.run(
        "scheduler", "score", str(scorer), "--input", str(chat_file), "--out", str(out),
        "--catalogue", str(tiny_catalogue), "--model", "tiny",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = pq.read_table(out).to_pydict()
    line_of = dict(zip(table["rank"], table["line"], strict=True))
    shown = [line.split()[:2] for line in done.stdout.splitlines()]
    assert shown[0] == ["rank", "line"]
    assert shown[1:11] == [[str(rank), str(line_of[rank])] for rank in range(1, 11)]
    assert "of 16 rows, by the tokens scorer" in done.stdout
    assert "no verdict" in done.stdout
    assert str(out) in done.stdout


def test_the_scores_are_json_on_request(
    cli: Any, scorer: Path, chat_file: Path, tiny_catalogue: Path, tmp_path: Path
) -> None:
    out = tmp_path / "weights.parquet"
    done = cli.run(
        "scheduler", "score", str(scorer), "--input", str(chat_file), "--out", str(out),
        "--catalogue", str(tiny_catalogue), "--json",
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert (found["weights"], found["examples"]) == (str(out), 16)
    assert 0 < found["effective_sample_size"] <= 1
    assert [row["rank"] for row in found["least_trusted"]] == list(range(1, 11))
    assert set(found["least_trusted"][0]) == {"line", "rank", "weight", "logit"}
    assert "no verdict" in found["note"]


@pytest.mark.parametrize(
    ("folder", "source", "out", "words"),
    [
        ("/no/such/scheduler", "CHAT", "OUT", "no such folder"),
        ("SCORER", "EMPTY", "OUT", "The file is empty"),
        ("SCORER", "CHAT", "EMPTY", "exists already"),
    ],
)
def test_bad_input_ends_with_3_and_without_a_traceback(
    cli: Any,
    scorer: Path,
    chat_file: Path,
    tmp_path: Path,
    folder: str,
    source: str,
    out: str,
    words: str,
) -> None:
    (tmp_path / "empty.jsonl").touch()
    places = {
        "SCORER": str(scorer),
        "CHAT": str(chat_file),
        "EMPTY": str(tmp_path / "empty.jsonl"),
        "OUT": str(tmp_path / "out.parquet"),
    }
    done = cli.run(
        "scheduler", "score", places.get(folder, folder), "--input", places[source],
        "--out", places[out],
    )  # fmt: skip
    assert done.returncode == 3
    assert words in done.stderr
    assert "Traceback" not in done.stderr
