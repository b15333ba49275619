"""Whole DPO runs of the pipeline on the tiny model, in this process."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from workers.pipeline.failure import PipelineFailure, Stopped
from workers.pipeline.run import run_job


def never() -> bool:
    return False


def write_preferences(path: Path, rows: int, prefix: str) -> Path:
    path.write_text(
        "".join(
            json.dumps(
                {
                    "input": {"messages": [{"role": "user", "content": f"{prefix} {index}"}]},
                    "preferred_output": [
                        {"role": "assistant", "content": ("yes", "no")[index % 2]}
                    ],
                    "non_preferred_output": [
                        {"role": "assistant", "content": ("no", "yes")[index % 2]}
                    ],
                }
            )
            + "\n"
            for index in range(rows)
        )
    )
    return path


@pytest.fixture
def dpo_spec(make_spec: Any, tmp_path: Path) -> Any:
    """A DPO job on the tiny model: 12 training pairs, 5 validation pairs, 6 steps."""
    return make_spec(
        method="dpo",
        training_file=write_preferences(tmp_path / "pairs.jsonl", 12, "question"),
        validation_file=write_preferences(tmp_path / "held_out.jsonl", 5, "other question"),
        hyperparameters={"n_epochs": 2, "batch_size": 4, "beta": 0.3},
    )


def test_a_dpo_job_runs_to_its_verdict(dpo_spec: Any, recorder: Any, tmp_path: Path) -> None:
    run_job(dpo_spec, tmp_path / "work", recorder, never)
    assert recorder.events[-1]["event"] == "result"
    assert len(recorder.of("metrics")) == 6
    table = pq.read_table(tmp_path / "work" / "bundle" / "safety_weights.parquet").to_pydict()
    assert table["line"] == list(range(1, 13))


def test_auto_is_written_out_with_beta(dpo_spec: Any, recorder: Any, tmp_path: Path) -> None:
    run_job(dpo_spec, tmp_path / "work", recorder, never)
    assert recorder.of("validated")[0]["hyperparameters"] == {
        "n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 0.2, "beta": 0.3,
    }  # fmt: skip


def test_the_first_step_loses_log_2(dpo_spec: Any, recorder: Any, tmp_path: Path) -> None:
    run_job(dpo_spec, tmp_path / "work", recorder, never)
    assert recorder.of("metrics")[0]["train_loss"] == pytest.approx(math.log(2), abs=1e-4)


def test_a_stopped_dpo_job_resumes_to_the_result_of_an_undisturbed_one(
    dpo_spec: Any, recorder: Any, tmp_path: Path
) -> None:
    whole = run_job(dpo_spec, tmp_path / "whole", recorder, never)
    recorder.events.clear()
    with pytest.raises(Stopped):
        run_job(dpo_spec, tmp_path / "cut", recorder, lambda: len(recorder.of("metrics")) >= 3)
    resumed = run_job(dpo_spec, tmp_path / "cut", recorder, never)
    assert resumed["artifact"] == whole["artifact"]


def test_a_chat_file_is_refused_before_anything_runs(
    dpo_spec: Any, make_spec: Any, recorder: Any, tmp_path: Path
) -> None:
    spec = dpo_spec.model_copy(update={"training_file": make_spec().training_file})
    with pytest.raises(PipelineFailure, match="in the chat format") as caught:
        run_job(spec, tmp_path / "work", recorder, never)
    assert caught.value.code == "invalid_training_file"
    assert recorder.of("metrics") == []
