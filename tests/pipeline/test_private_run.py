"""Private tuning: its account across checkpoints, and whole jobs from spec to report."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from opacus.accountants import PRVAccountant

from analyses.privacy.accounting import dp_sgd_curve, dp_sgd_losses
from analyses.privacy.spec import ADJACENCY, Attack, Phase
from benchmarks.workload import mixed_rows
from jobspec.defense import DefenseOptions, PerturbationOptions, PlainOptions
from jobspec.hyperparameters import ResolvedHyperparameters
from jobspec.privacy import PrivacyAttack
from jobspec.spec import CheckpointOptions
from workers.pipeline.failure import PipelineFailure, Stopped
from workers.pipeline.hashing import file_sha256
from workers.pipeline.models import attach_adapter, load_base, trainable
from workers.pipeline.private_noise import seeded
from workers.pipeline.private_plan import plan_privacy, privacy_report
from workers.pipeline.run import run_job
from workers.pipeline.tune import Tuned, tune
from workers.pipeline.tuning_inputs import PrivatePlan, TuneData, TuneSettings

PLAIN = {"scheduler": {"name": "none"}, "perturbation": {"mode": "none"}}
NOISE = {"noise_multiplier": 1.5, "clip": 0.5}
SIGMA, RATE, STEPS = 1.5, 4 / 12, 6


def never() -> bool:
    return False


def stop_after_metrics(recorder: Any, steps: int) -> Callable[[], bool]:
    return lambda: len(recorder.of("metrics")) >= steps


@pytest.fixture
def tune_privately(tiny, tmp_path: Path, recorder) -> Callable[..., tuple[Tuned, Any]]:
    """12 rows in batches of 4, two epochs; the result and the model."""
    base = load_base(tiny, tmp_path / "cache")
    adapted = attach_adapter(base.model, tiny.lora, 3)
    first = {name: p.detach().clone() for name, p in trainable(adapted).items()}

    def run(
        folder: str, seed: int, stop: Callable[[], bool] = never, *, rate: float = RATE
    ) -> tuple[Tuned, Any]:
        with torch.no_grad():
            for name, parameter in trainable(adapted).items():
                parameter.copy_(first[name])
        rows = mixed_rows(12, 0, shortest=6, longest=30, median=12.0, vocabulary=258)
        settings = TuneSettings(
            hyperparameters=ResolvedHyperparameters(
                n_epochs=2, batch_size=4, learning_rate_multiplier=1.0
            ),
            lora=tiny.lora,
            defense=DefenseOptions(
                scheduler=PlainOptions(), perturbation=PerturbationOptions(mode="none")
            ),
            checkpoints=CheckpointOptions(every_steps=2),
            seed=3,
            key="test",
            private=PrivatePlan(SIGMA, rate, STEPS, 0.5, seeded(seed)),
        )
        data = TuneData(user=rows, validation=[], alignment=[], harmful=[])
        return tune(adapted, data, settings, tmp_path / folder, recorder, stop), adapted

    return run


def adapter(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainable(model).values()])


def test_the_account_counts_every_step_also_those_without_rows(tune_privately, recorder):
    tuned, _ = tune_privately("work", 1, rate=0.05)
    assert 0 in [event["drawn_rows"] for event in recorder.of("metrics")]
    assert tuned.spent == [(SIGMA, 0.05, STEPS)]


@pytest.mark.parametrize("stop_at", [1, 3])
def test_a_resumed_run_has_spent_what_an_unbroken_one_has(tune_privately, recorder, stop_at: int):
    whole, model = tune_privately("whole", 1)
    expected = adapter(model).clone()
    recorder.events.clear()
    with pytest.raises(Stopped):
        tune_privately("broken", 1, stop_after_metrics(recorder, stop_at))
    resumed, model = tune_privately("broken", 1)
    assert resumed.spent == whole.spent == [(SIGMA, RATE, STEPS)]
    assert torch.equal(adapter(model), expected)


def test_a_run_that_was_killed_after_a_checkpoint_counts_no_step_twice(tune_privately, recorder):
    """Step 3 was taken, but no checkpoint holds it: it is taken anew, with other noise."""

    def killed_in_step_four() -> bool:
        if len(recorder.of("metrics")) == 3:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        tune_privately("broken", 1, killed_in_step_four)
    recorder.events.clear()
    resumed, _ = tune_privately("broken", 2)
    assert [event["step"] for event in recorder.of("metrics")] == [3, 4, 5, 6]
    assert resumed.spent == [(SIGMA, RATE, STEPS)]


def test_a_checkpoint_without_its_account_is_refused(tune_privately, recorder, tmp_path: Path):
    with pytest.raises(Stopped):
        tune_privately("broken", 1, stop_after_metrics(recorder, 2))
    state = next((tmp_path / "broken" / "checkpoints").glob("step-*")) / "state.json"
    content = json.loads(state.read_text())
    content["numbers"]["spent"] = []
    state.write_text(json.dumps(content))
    with pytest.raises(PipelineFailure, match="privacy spent does not fit step 2"):
        tune_privately("broken", 1)


def test_the_noise_is_another_with_another_seed(tune_privately):
    _, model = tune_privately("one", 1)
    first = adapter(model).clone()
    _, model = tune_privately("two", 2)
    assert not torch.equal(adapter(model), first)


def test_our_account_agrees_with_that_of_opacus(tune_privately):
    """Its PRV accountant, within the error that it was asked for."""
    tuned, _ = tune_privately("work", 1)
    theirs = PRVAccountant()
    theirs.history = list(tuned.spent)
    phase = Phase(noise_multiplier=SIGMA, sampling_rate=RATE, steps=STEPS)
    ours = dp_sgd_losses((phase,), "add_or_remove_one").get_epsilon_for_delta(1e-5)
    assert ours == pytest.approx(theirs.get_epsilon(1e-5, eps_error=0.005), abs=0.01)


def test_a_private_job_reports_its_guarantee(make_spec, recorder, tmp_path: Path):
    spec = make_spec(defense=PLAIN, privacy=NOISE)
    report = run_job(spec, tmp_path / "work", recorder, never)
    found = report["privacy"]
    phase = Phase(noise_multiplier=SIGMA, sampling_rate=RATE, steps=STEPS)
    assert found["history"] == [phase.model_dump()]
    assert (found["rows"], found["clip"], found["delta"]) == (12, 0.5, 1e-5)
    for attack in get_args(Attack):
        curve = dp_sgd_curve((phase,), ADJACENCY[attack])
        for risk in found["risks"][attack]["risks"]:
            assert risk["max_success"] == pytest.approx(float(curve.success(risk["baseline"])))
        assert found["risks"][attack]["worst_case"]["advantage"] == pytest.approx(curve.advantage)
    assert "every training row but one" in found["statement"]
    assert recorder.of("result")[0]["report"]["privacy"] == found


def test_the_guarantee_stands_in_the_report_whose_hash_the_manifest_has(
    make_spec, recorder, tmp_path: Path
):
    spec = make_spec(defense=PLAIN, privacy=NOISE)
    lines = spec.training_file.read_text().splitlines(keepends=True)
    spec.training_file.write_text("".join([*lines, *lines[:3]]))
    report = run_job(spec, tmp_path / "work", recorder, never)
    bundle = tmp_path / "work" / "bundle"
    stored = json.loads((bundle / "report.json").read_text())
    manifest = json.loads((bundle / "manifest.json").read_text())["files"]
    assert stored["privacy"] == report["privacy"]
    assert manifest["report.json"]["sha256"] == file_sha256(bundle / "report.json")
    # Equal rows count once.
    assert report["privacy"]["rows"] == 12
    assert report["data"]["copies_left_out"] == {"examples": 3, "lines": [13, 14, 15]}


def test_a_target_is_met_with_noise_that_is_told_before_tuning(make_spec, recorder, tmp_path: Path):
    target = {"attack": "attribute_inference", "baseline": 0.25, "max_success": 0.6}
    spec = make_spec(
        defense={
            "scheduler": {"name": "none"},
            "perturbation": {"mode": "post_hoc", "scales": [0.5]},
        },
        privacy={"target": target},
    )
    report = run_job(spec, tmp_path / "work", recorder, never)
    found = report["privacy"]
    order = [event["event"] for event in recorder.events]
    told = next(e for e in recorder.of("message") if "noise multiplier" in e["message"])
    assert recorder.events.index(told) < order.index("metrics")
    assert told["data"]["noise_multiplier"] == found["noise_multiplier"]
    risks = found["risks"]["attribute_inference"]["risks"]
    reached = next(risk["max_success"] for risk in risks if risk["baseline"] == 0.25)
    assert 0.59 < reached <= 0.6
    assert found["target"] == target


@pytest.mark.parametrize(
    ("max_success", "words"), [(0.95, "asks for no noise"), (0.1000001, "out of reach")]
)
def test_a_target_that_no_useful_noise_meets_is_refused_before_tuning(
    make_spec, recorder, tmp_path: Path, max_success: float, words: str
):
    """One epoch of single rows: even without noise a row is missed with a chance of e^-1."""
    target = {"attack": "membership", "baseline": 0.1, "max_success": max_success}
    spec = make_spec(defense=PLAIN, privacy={"target": target})
    hyper = ResolvedHyperparameters(n_epochs=1, batch_size=1, learning_rate_multiplier=1.0)
    with pytest.raises(PipelineFailure, match=words) as caught:
        plan_privacy(spec, 12, hyper, tmp_path, recorder, never)
    assert (caught.value.code, caught.value.param) == ("invalid_spec", "privacy.target")


def test_a_delta_that_hides_a_published_row_is_refused(make_spec, recorder, tmp_path: Path):
    spec = make_spec(defense=PLAIN, privacy={**NOISE, "delta": 0.1})
    hyper = ResolvedHyperparameters(n_epochs=1, batch_size=4, learning_rate_multiplier=1.0)
    with pytest.raises(PipelineFailure, match=r"with 12 rows it must be below 0\.0833") as caught:
        plan_privacy(spec, 12, hyper, tmp_path, recorder, never)
    assert caught.value.param == "privacy.delta"


def test_a_report_of_anything_but_the_plan_guarantees_nothing(make_spec):
    spec = make_spec(defense=PLAIN, privacy=NOISE)
    plan = PrivatePlan(SIGMA, RATE, STEPS, 0.5, seeded(1))
    with pytest.raises(PipelineFailure, match="not what was planned"):
        privacy_report(spec, plan, [(SIGMA, RATE, STEPS + 1)], 12)


def test_a_job_without_privacy_has_no_guarantee_in_its_report(make_spec):
    assert privacy_report(make_spec(defense=PLAIN), None, [], 12) == {}


def test_a_job_on_a_tuned_model_says_what_its_guarantee_leaves_out(make_spec):
    spec = make_spec(defense=PLAIN, privacy=NOISE, lineage=("earlier",))
    plan = PrivatePlan(SIGMA, RATE, STEPS, 0.5, seeded(1))
    found = privacy_report(spec, plan, [(SIGMA, RATE, STEPS)], 12)["privacy"]
    assert any("continues from a tuned model" in limit for limit in found["limits"])


def test_jobs_and_analyses_name_the_same_attacks():
    assert get_args(PrivacyAttack) == get_args(Attack)
