"""Every defense that a job can name, through the whole pipeline on the tiny model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from workers.pipeline.failure import PipelineFailure, Stopped
from workers.pipeline.run import run_job

NOTHING = {"mode": "none"}
SMALL = {"alignment_rows": 12}
TUNING: dict[str, dict[str, Any]] = {
    "mix": {"name": "mix", **SMALL},
    "lisa": {"name": "lisa", "alignment_steps": 1, "user_steps": 2, **SMALL},
    "constrained_sft": {"name": "constrained_sft"},
    "seal": {"name": "seal", "keep_share": 0.5, **SMALL},
    "prefilter": {"name": "prefilter"},
    "sgld": {"name": "bds", "sampler": "sgld", **SMALL},
    "sigmoid": {"name": "bds", "transform": "sigmoid", **SMALL},
    "neural embedding": {"name": "bds", "form": "neural", **SMALL},
    "neural tokens": {"name": "bds", "form": "neural", "scorer": "tokens", **SMALL},
    "neural causal_lm": {"name": "bds", "form": "neural", "scorer": "causal_lm", **SMALL},
}


def never() -> bool:
    return False


def stop_after_metrics(recorder: Any, steps: int) -> Callable[[], bool]:
    return lambda: len(recorder.of("metrics")) >= steps


@pytest.mark.parametrize("name", TUNING)
def test_a_job_under_any_method_resumes_to_the_result_of_an_undisturbed_one(
    make_spec, recorder, tmp_path: Path, name: str
):
    spec = make_spec(defense={"scheduler": TUNING[name], "perturbation": NOTHING})
    undisturbed = run_job(spec, tmp_path / "whole", recorder, never)
    steps = [(event["step"], event["total_steps"]) for event in recorder.of("metrics")]
    planned = recorder.of("validated")[0]["total_steps"]
    assert steps == [(step, planned) for step in range(1, planned + 1)]
    for stop_at in {3, planned - 2}:
        recorder.events.clear()
        folder = tmp_path / f"broken-{stop_at}"
        with pytest.raises(Stopped):
            run_job(spec, folder, recorder, stop_after_metrics(recorder, stop_at))
        resumed = run_job(spec, folder, recorder, never)
        assert resumed["artifact"] == undisturbed["artifact"]
        assert resumed["defense"] == undisturbed["defense"]


@pytest.mark.parametrize("mode", ["random_noise", "antidote"])
def test_every_change_of_the_finished_adapter_can_be_undone(
    make_spec, recorder, tmp_path: Path, mode: str
):
    spec = make_spec(
        defense={
            "scheduler": {"name": "none"},
            "perturbation": {"mode": mode, "scales": [0.5], "utility_budget": 1},
        },
        policy={
            "version": 1,
            "minimum_prompts": 1,
            "rules": [{"metric": "harmfulness.score_plus", "bound": "value", "max": 1.0}],
        },
    )
    report = run_job(spec, tmp_path / "work", recorder, never)
    folder = tmp_path / "work" / "bundle"
    assert report["defense"]["perturbation"]["scale"] == 0.5
    eps = load_file(folder / "perturbation" / "eps.safetensors")
    before = load_file(folder / "perturbation" / "adapter_before.safetensors")
    released = load_file(folder / "adapter_model.safetensors")
    assert any(bool(tensor.any()) for tensor in eps.values())
    for name, tensor in before.items():
        stored = released[name.replace(".default", "")]
        torch.testing.assert_close(stored, tensor + 0.5 * eps[name], rtol=0, atol=0)


def test_safe_lora_says_that_it_needs_an_aligned_base(make_spec, recorder, tmp_path: Path):
    spec = make_spec(defense={"scheduler": {"name": "none"}, "perturbation": {"mode": "safe_lora"}})
    with pytest.raises(PipelineFailure, match="align") as caught:
        run_job(spec, tmp_path / "work", recorder, never)
    assert caught.value.code == "invalid_spec"


def test_seal_tunes_on_the_rows_it_kept_and_the_table_says_which(
    make_spec, recorder, tmp_path: Path
):
    spec = make_spec(defense={"scheduler": TUNING["seal"], "perturbation": NOTHING})
    run_job(spec, tmp_path / "work", recorder, never)
    table = pq.read_table(tmp_path / "work" / "bundle" / "safety_weights.parquet").to_pydict()
    weights = {kept: [] for kept in (True, False)}
    for weight, kept in zip(table["weight"], table["kept"], strict=True):
        weights[kept].append(weight)
    assert len(weights[True]) == 6
    assert min(weights[True]) >= max(weights[False])


def test_canaries_get_a_verdict_but_are_never_learned(make_spec, recorder, tmp_path: Path):
    with_canaries = run_job(make_spec(), tmp_path / "with", recorder, never)
    spec = make_spec(
        defense={
            "scheduler": {"name": "bds", **SMALL},
            "perturbation": NOTHING,
            "canaries": {"count": 0},
        }
    )
    without = run_job(spec, tmp_path / "without", recorder, never)
    found = with_canaries["defense"]["scheduler"]["canaries"]
    assert found["harmful"] == 20
    assert with_canaries["metrics"]["defense.canary_auc"]["value"] == found["auc"]
    assert with_canaries["trained_tokens"] == without["trained_tokens"]
    assert without["metrics"]["defense.canary_auc"]["value"] is None
    codes = [item["code"] for item in without["defense"]["conditions"]]
    assert "canaries_unavailable" in codes


def test_a_trained_scorer_is_used_as_it_is_in_another_job(make_spec, recorder, tmp_path: Path):
    neural = {"scheduler": TUNING["neural embedding"], "perturbation": NOTHING}
    run_job(make_spec(defense=neural), tmp_path / "first", recorder, never)
    scorer = tmp_path / "first" / "bundle" / "scheduler"
    before = load_file(scorer / "scorer.safetensors")
    run_job(
        make_spec(defense=neural, scheduler_checkpoint=scorer, seed=8),
        tmp_path / "second",
        recorder,
        never,
    )
    after = load_file(tmp_path / "second" / "bundle" / "scheduler" / "scorer.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_scorer_of_another_tokenizer_is_refused(make_spec, recorder, tmp_path: Path):
    neural = {"scheduler": TUNING["neural embedding"], "perturbation": NOTHING}
    run_job(make_spec(defense=neural), tmp_path / "first", recorder, never)
    spec = make_spec(
        defense={"scheduler": TUNING["neural tokens"], "perturbation": NOTHING},
        scheduler_checkpoint=tmp_path / "first" / "bundle" / "scheduler",
    )
    with pytest.raises(PipelineFailure, match=r"scheduler_checkpoint: .*tokenizer"):
        run_job(spec, tmp_path / "second", recorder, never)


def test_a_scheduler_checkpoint_without_the_neural_scheduler_is_refused(
    make_spec, recorder, tmp_path: Path
):
    with pytest.raises(PipelineFailure, match="neural"):
        run_job(make_spec(scheduler_checkpoint=tmp_path), tmp_path / "work", recorder, never)


def test_an_empty_alignment_file_is_refused(make_spec, recorder, tmp_path: Path):
    empty = tmp_path / "alignment.jsonl"
    empty.touch()
    with pytest.raises(PipelineFailure, match="no rows") as caught:
        run_job(make_spec(alignment_file=empty), tmp_path / "work", recorder, never)
    assert caught.value.code == "invalid_spec"


def test_an_alignment_file_that_overlaps_the_training_file_is_refused(
    make_spec, recorder, tmp_path: Path
):
    spec = make_spec()
    rows = [json.loads(line)["messages"] for line in spec.training_file.read_text().splitlines()]
    overlapping = tmp_path / "alignment.jsonl"
    overlapping.write_text(
        "".join(json.dumps({"prompt": m[0]["content"], "response": "No."}) + "\n" for m in rows)
    )
    with pytest.raises(PipelineFailure, match="overlaps"):
        run_job(make_spec(alignment_file=overlapping), tmp_path / "work", recorder, never)


def test_identical_rows_are_reported_as_such(make_spec, recorder, tmp_path: Path):
    spec = make_spec()
    first = spec.training_file.read_text().splitlines(keepends=True)[0]
    spec.training_file.write_text(first * 12)
    report = run_job(spec, tmp_path / "work", recorder, never)
    assert report["data"]["training_file"]["duplicate_examples"] == 11


def test_a_loss_that_stays_not_finite_ends_the_job_with_a_reason(
    make_spec, recorder, tmp_path: Path
):
    spec = make_spec(
        hyperparameters={"n_epochs": 4, "batch_size": 4, "learning_rate_multiplier": 1e30}
    )
    with pytest.raises(PipelineFailure, match="not finite in 5 steps in a row"):
        run_job(spec, tmp_path / "work", recorder, never)


def pair_lines(rows: int, prefix: str = "message") -> str:
    return "".join(
        json.dumps(
            {
                "input": {"messages": [{"role": "user", "content": f"{prefix} number {index}"}]},
                "preferred_output": [{"role": "assistant", "content": "yes"}],
                "non_preferred_output": [{"role": "assistant", "content": "no, never"}],
            }
        )
        + "\n"
        for index in range(rows)
    )


@pytest.fixture
def pairs(tmp_path: Path) -> dict[str, Path]:
    files = {name: tmp_path / f"{name}.pairs.jsonl" for name in ("training", "validation")}
    files["training"].write_text(pair_lines(12))
    files["validation"].write_text(pair_lines(5, "held-out"))
    return {"training_file": files["training"], "validation_file": files["validation"]}


@pytest.mark.parametrize("mode", ["none", "joint"])
@pytest.mark.parametrize("scheduler", ["bds", "none", "mix", "lisa", "neural embedding"])
def test_a_preference_job_learns_to_prefer_and_resumes(
    make_spec, recorder, tmp_path: Path, pairs, scheduler: str, mode: str
):
    options = TUNING.get(scheduler, {"name": scheduler, **(SMALL if scheduler == "bds" else {})})
    spec = make_spec(
        **pairs,
        method="dpo",
        hyperparameters={
            "n_epochs": 4,
            "batch_size": 4,
            "learning_rate_multiplier": 5,
            "beta": 0.5,
        },
        defense={"scheduler": options, "perturbation": {"mode": mode, "scales": [0.0]}},
    )
    report = run_job(spec, tmp_path / "whole", recorder, never)
    losses = [event["train_loss"] for event in recorder.of("metrics") if "train_loss" in event]
    if scheduler != "lisa":  # which begins with alignment steps
        assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < 0.6
    recorder.events.clear()
    with pytest.raises(Stopped):
        run_job(spec, tmp_path / "broken", recorder, stop_after_metrics(recorder, 5))
    resumed = run_job(spec, tmp_path / "broken", recorder, never)
    assert resumed["artifact"] == report["artifact"]


def test_a_chat_file_for_a_preference_job_is_refused(make_spec, recorder, tmp_path: Path):
    with pytest.raises(PipelineFailure, match="preference") as caught:
        run_job(make_spec(method="dpo"), tmp_path / "work", recorder, never)
    assert caught.value.code == "invalid_training_file"
