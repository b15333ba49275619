"""Whole runs of the pipeline on the tiny model, in this process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from evaluators.diversity.store import read_answers
from workers.pipeline.failure import PipelineFailure, Stopped
from workers.pipeline.hashing import file_sha256
from workers.pipeline.models import attach_adapter, load_base
from workers.pipeline.publish import ArtifactChanged, save_adapter
from workers.pipeline.run import run_job


def never() -> bool:
    return False


def stop_after_metrics(recorder: Any, steps: int) -> Callable[[], bool]:
    return lambda: len(recorder.of("metrics")) >= steps


def test_a_job_goes_through_its_stages_in_order(make_spec, recorder, tmp_path: Path):
    run_job(make_spec(), tmp_path / "work", recorder, never)
    assert [event["stage"] for event in recorder.of("stage")] == [
        "validating", "tuning", "perturbing", "evaluating", "gating", "publishing",
    ]  # fmt: skip
    assert recorder.events[-1]["event"] == "result"


def test_the_bundle_is_what_its_manifest_says(make_spec, recorder, tmp_path: Path):
    report = run_job(make_spec(), tmp_path / "work", recorder, never)
    bundle = tmp_path / "work" / "bundle"
    manifest = json.loads((bundle / "manifest.json").read_text())["files"]
    on_disk = {p.relative_to(bundle).as_posix() for p in bundle.rglob("*") if p.is_file()}
    assert on_disk == {*manifest, "manifest.json"}
    assert all(file_sha256(bundle / name) == entry["sha256"] for name, entry in manifest.items())
    assert manifest["adapter_model.safetensors"]["sha256"] == report["artifact"]["adapter_sha256"]


def test_the_weights_table_has_one_row_per_example_with_mean_weight_one(
    make_spec, recorder, tmp_path: Path
):
    run_job(make_spec(), tmp_path / "work", recorder, never)
    table = pq.read_table(tmp_path / "work" / "bundle" / "safety_weights.parquet").to_pydict()
    assert table["line"] == list(range(1, 13))
    assert sum(table["weight"]) == pytest.approx(12)
    assert sorted(table["rank"]) == list(range(1, 13))


def test_the_same_seed_gives_the_same_adapter(make_spec, recorder, tmp_path: Path):
    reports = [run_job(make_spec(), tmp_path / name, recorder, never) for name in ("one", "two")]
    assert reports[0]["artifact"] == reports[1]["artifact"]


@pytest.mark.parametrize("mode", ["none", "joint", "post_hoc"])
def test_a_stopped_job_resumes_to_the_result_of_an_undisturbed_one(
    make_spec, recorder, tmp_path: Path, mode: str
):
    spec = make_spec(
        defense={
            "scheduler": {"name": "bds", "alignment_rows": 12},
            "perturbation": {"mode": mode, "scales": [0.5]},
        }
    )
    undisturbed = run_job(spec, tmp_path / "whole", recorder, never)
    losses = [event["train_loss"] for event in recorder.of("metrics")]
    recorder.events.clear()
    with pytest.raises(Stopped):
        run_job(spec, tmp_path / "broken", recorder, stop_after_metrics(recorder, 3))
    resumed = run_job(spec, tmp_path / "broken", recorder, never)
    assert [event["train_loss"] for event in recorder.of("metrics")] == losses
    assert resumed["artifact"] == undisturbed["artifact"]
    assert resumed["metrics"] == undisturbed["metrics"]


def test_a_checkpoint_of_another_job_is_refused(make_spec, recorder, tmp_path: Path):
    with pytest.raises(Stopped):
        run_job(make_spec(), tmp_path / "work", recorder, stop_after_metrics(recorder, 3))
    with pytest.raises(PipelineFailure, match="belongs to another job"):
        run_job(make_spec(seed=4), tmp_path / "work", recorder, never)


def test_the_perturbation_is_stored_and_can_be_undone(make_spec, recorder, tmp_path: Path):
    spec = make_spec(
        defense={
            "scheduler": {"name": "none"},
            "perturbation": {"mode": "post_hoc", "scales": [0.5], "rho": 1.0},
        }
    )
    report = run_job(spec, tmp_path / "work", recorder, never)
    bundle = tmp_path / "work" / "bundle"
    eps = load_file(bundle / "perturbation" / "eps.safetensors")
    before = load_file(bundle / "perturbation" / "adapter_before.safetensors")
    released = load_file(bundle / "adapter_model.safetensors")
    norm = torch.sqrt(sum(tensor.double().square().sum() for tensor in eps.values()))
    assert float(norm) == pytest.approx(1.0, rel=1e-5)
    scale = report["defense"]["perturbation"]["scale"]
    assert scale == 0.5 or not report["defense"]["perturbation"]["met"]
    for name, tensor in before.items():
        stored = released[name.replace(".default", "")]
        torch.testing.assert_close(stored, tensor + scale * eps[name], rtol=0, atol=0)


def test_undefended_tuning_has_no_weights_and_no_perturbation(make_spec, recorder, tmp_path: Path):
    spec = make_spec(defense={"scheduler": {"name": "none"}, "perturbation": {"mode": "none"}})
    report = run_job(spec, tmp_path / "work", recorder, never)
    assert report["defense"] == {
        "scheduler": {"name": "none"},
        "perturbation": {"mode": "none"},
        "conditions": [],
    }
    assert not (tmp_path / "work" / "bundle" / "safety_weights.parquet").exists()


def test_the_base_is_measured_once_for_two_jobs(make_spec, recorder, tmp_path: Path):
    run_job(make_spec(), tmp_path / "one", recorder, never)
    recorder.events.clear()
    run_job(make_spec(), tmp_path / "two", recorder, never)
    assert not [e for e in recorder.of("progress") if e["stage"].startswith("base model")]


def test_too_few_prompts_are_inconclusive_never_passed(make_spec, recorder, tmp_path: Path):
    policy = {
        "version": 1,
        "maximum_unresolved": 1.0,
        "maximum_one_word": 1.0,
        "rules": [{"metric": "harmfulness.score_plus", "bound": "value", "max": 1.0}],
    }
    report = run_job(make_spec(policy=policy), tmp_path / "work", recorder, never)
    assert report["gate"]["verdict"] == "inconclusive"
    assert report["gate"]["rules"][0]["outcome"] == "too_few"


def test_a_policy_that_holds_passes(make_spec, recorder, tmp_path: Path):
    policy = {
        "version": 1,
        "minimum_prompts": 1,
        "maximum_unresolved": 1.0,
        "maximum_one_word": 1.0,
        "rules": [
            {"metric": "harmfulness.score_plus", "bound": "value", "max": 1.0},
            {"metric": "defense.canary_auc", "bound": "value", "min": 0.0},
        ],
    }
    report = run_job(make_spec(policy=policy), tmp_path / "work", recorder, never)
    assert report["gate"]["verdict"] == "passed"


def test_every_faulty_line_is_named(make_spec, recorder, tmp_path: Path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": []}\n' * 12)
    with pytest.raises(PipelineFailure) as caught:
        run_job(make_spec(training_file=bad), tmp_path / "work", recorder, never)
    assert caught.value.code == "invalid_training_file"
    assert [detail.split(":")[0] for detail in caught.value.details] == [
        f"Line {line}" for line in range(1, 13)
    ]


def test_rows_over_the_context_are_refused_with_line_and_length(
    make_spec, recorder, tmp_path: Path
):
    long = tmp_path / "long.jsonl"
    row = {
        "messages": [
            {"role": "user", "content": "x" * 600},
            {"role": "assistant", "content": "no"},
        ]
    }
    lines = make_spec().training_file.read_text() + json.dumps(row) + "\n"
    long.write_text(lines)
    with pytest.raises(
        PipelineFailure, match=r"Line 13: 6\d\d tokens or more, the limit is 512"
    ) as caught:
        run_job(make_spec(training_file=long), tmp_path / "work", recorder, never)
    assert caught.value.code == "context_length_exceeded"


def test_the_report_counts_tokens_duplicates_and_overlap(make_spec, recorder, tmp_path: Path):
    spec = make_spec()
    lines = spec.training_file.read_text().splitlines(keepends=True)
    spec.training_file.write_text("".join([*lines, lines[0]]))
    spec.validation_file.write_text(lines[0] + lines[1])
    report = run_job(spec, tmp_path / "work", recorder, never)["data"]
    assert report["training_file"]["duplicate_lines"] == [13]
    assert report["validation_file"]["overlapping_examples"] == 2
    assert report["training_file"]["trained_tokens"] == sum(
        len(word) + 1 for word in ["yes", "no"] * 6 + ["yes"]
    )
    estimate = recorder.of("validated")[0]["estimate"]
    assert estimate["tuning_seconds"] >= 0


def test_a_job_that_was_killed_while_it_evaluated_has_the_verdict_of_an_undisturbed_one(
    make_spec, recorder, tmp_path: Path
):
    undisturbed = run_job(make_spec(), tmp_path / "whole", recorder, never)
    recorder.events.clear()
    spec = make_spec(cache_dir=tmp_path / "another cache")

    def while_the_tuned_model_answers() -> bool:
        return any(e["stage"] == "tuned model: open_ended" for e in recorder.of("progress"))

    with pytest.raises(Stopped):
        run_job(spec, tmp_path / "broken", recorder, while_the_tuned_model_answers)
    recorder.events.clear()
    resumed = run_job(spec, tmp_path / "broken", recorder, never)
    asked_again = {event["stage"] for event in recorder.of("progress")}
    assert not asked_again & {"base model: harmful", "tuned model: harmful", "tuned model: sweep"}
    for block in ("artifact", "metrics", "base_metrics", "group_metrics", "gate", "evaluation"):
        assert resumed[block] == undisturbed[block], block
    tables = [
        pq.read_table(tmp_path / work / "bundle" / "evaluation_samples.parquet")
        for work in ("whole", "broken")
    ]
    assert tables[0].equals(tables[1])


def test_a_suite_with_fewer_prompts_than_planned_is_inconclusive(
    make_spec, recorder, tmp_path: Path
):
    suite = tmp_path / "suite.jsonl"
    suite.write_text("".join(json.dumps({"prompt": f"request {n}"}) + "\n" for n in range(3)))
    policy = {
        "version": 1,
        "maximum_unresolved": 1.0,
        "maximum_one_word": 1.0,
        "rules": [{"metric": "refusal.benign", "bound": "value", "max": 1.0}],
    }
    verdicts = {}
    for planned in (3, 4):
        suites = [{"path": suite, "format": "own", "planned": planned}]
        spec = make_spec(
            policy=policy,
            evaluation={**make_spec().evaluation.model_dump(), "suites": suites},
            defense={"scheduler": {"name": "none"}, "perturbation": {"mode": "none"}},
        )
        report = run_job(spec, tmp_path / str(planned), recorder, never)
        verdicts[planned] = report["gate"]["verdict"]
        assert report["evaluation"]["suites"][0]["planned"] == planned
    assert verdicts == {3: "passed", 4: "inconclusive"}


def test_an_adapter_that_is_not_saved_as_it_was_judged_is_not_published(
    make_spec, recorder, tmp_path: Path
):
    spec = make_spec()
    model = attach_adapter(load_base(spec.model, spec.cache_dir).model, spec.model.lora, 0)
    save_adapter(model, "tiny", tmp_path / "adapter")
    plain = model.save_pretrained

    def rounded(folder: Path, **options: Any) -> None:
        plain(folder, **options)
        path = Path(folder) / "adapter_model.safetensors"
        tensors = load_file(path)
        save_file({name: t.bfloat16() for name, t in tensors.items()}, path)

    model.save_pretrained = rounded
    with pytest.raises(ArtifactChanged, match="differs from the tuned one"):
        save_adapter(model, "tiny", tmp_path / "adapter")


def test_the_bundle_keeps_open_answers_by_which_models_are_compared(
    make_spec, recorder, tmp_path: Path
):
    run_job(make_spec(), tmp_path / "work", recorder, never)
    stored = read_answers((tmp_path / "work/bundle/open_ended_answers.parquet").read_bytes())
    assert stored.width == 384
    assert stored.answers
    assert stored.refused is not None
