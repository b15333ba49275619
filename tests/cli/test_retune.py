"""`tunegate retune`: the whole way from a job to the same job without the rows that are blamed."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

QUICK = {
    "harmful_prompts": 2,
    "safe_lookalikes": 2,
    "benign_prompts": 1,
    "open_ended_prompts": 1,
    "open_ended_samples": 2,
    "search_prompts": 1,
    "sweep_prompts": 0,
    "utility_rows": 2,
    "max_new_tokens": 4,
}
POLICY = {
    "version": 1,
    "minimum_prompts": 1,
    "maximum_unresolved": 1.0,
    "maximum_one_word": 1.0,
    "rules": [{"metric": "refusal.over_refusal", "bound": "value", "max": 1.0}],
}


@pytest.fixture
def spec(tmp_path: Path, tiny_catalogue: Path, chat_file: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "training_file": str(chat_file),
                "catalogue": str(tiny_catalogue),
                "cache_dir": str(tmp_path / "cache"),
                "hyperparameters": {"n_epochs": 1},
                "defense": {"scheduler": "none", "perturbation": "none"},
                "evaluation": QUICK,
                "policy": POLICY,
                "threads": 1,
            }
        )
    )
    return path


@pytest.mark.slow
def test_a_job_is_tuned_again_without_the_rows_that_are_blamed(
    cli: Any, tmp_path: Path, spec: Path, tiny_catalogue: Path, chat_file: Path
) -> None:
    first = cli.run("run", str(spec), "--out", str(tmp_path / "first"))
    assert first.returncode == 0, first.stderr
    request = tmp_path / "request.json"
    target = {"prompt": "Say number 3", "completion": "Number 3"}
    # The new file has fewer lines than are named here.
    lines = list(range(1, 17))
    request.write_text(json.dumps({"targets": [target], "methods": ["grad_dot"], "rows": lines}))
    blamed = cli.run(
        *("analyze", "attribution.final_model", "--input", str(request)),
        *("--out", str(tmp_path / "why"), "--bundle", str(tmp_path / "first")),
        *("--training-file", str(chat_file), "--catalogue", str(tiny_catalogue)),
    )
    assert blamed.returncode == 0, blamed.stderr
    again = cli.run(
        *("retune", str(spec), "--result", str(tmp_path / "why/result.json")),
        *("--remove-top", "2", "--out", str(tmp_path / "again")),
        *("--before", str(tmp_path / "first"), "--json"),
    )
    assert again.returncode == 0, again.stderr
    changes = json.loads(again.stdout)
    assert len(changes["removed_lines"]) == 2
    assert changes["rows_kept"] == 14
    assert changes["verdict"] == {"before": "passed", "after": "passed"}
    kept = (tmp_path / "again/training.jsonl").read_text().splitlines()
    assert len([line for line in kept if line.strip()]) == 14
    assert changes["metrics"]["refusal.over_refusal"]["before"] is not None
    assert changes["targets"]["rows_after"] == 14
    assert json.loads((tmp_path / "again/changes.json").read_text()) == changes


@pytest.mark.parametrize("content", ["{}", "no json", '{"kind": "privacy.risk"}'])
def test_a_result_of_something_else_is_refused(
    cli: Any, tmp_path: Path, spec: Path, content: str
) -> None:
    other = tmp_path / "result.json"
    other.write_text(content)
    done = cli.run(
        *("retune", str(spec), "--result", str(other), "--remove-top", "1"),
        *("--out", str(tmp_path / "out")),
    )
    assert done.returncode == 3
    assert "result.json" in done.stderr
    assert "Traceback" not in done.stderr
