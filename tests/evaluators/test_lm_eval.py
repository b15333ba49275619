import json
import random
import sys

import numpy as np
import pytest
import torch

from evaluators.utility.lm_eval import (
    LmEvalMissingError,
    LmEvalTaskError,
    metrics_of_results,
    run_tasks,
)

# As lm-eval 0.4.13 returns it, shortened.
RESULTS = {
    "results": {
        "arc_easy": {
            "alias": "arc_easy",
            "sample_len": 8,
            "acc,none": 0.5,
            "acc_stderr,none": 0.1889822365046136,
            "acc_norm,none": 0.25,
            "acc_norm_stderr,none": "N/A",
        },
        "gsm8k": {"exact_match,strict-match": 0.125, "exact_match_stderr,strict-match": 0.125},
        "broken": {"perplexity,none": float("nan")},
    },
    "n-samples": {
        "arc_easy": {"original": 2376, "effective": 8},
        "gsm8k": {"original": 1319, "effective": 8},
    },
}


@pytest.fixture
def toy_task(tmp_path):
    """A harness task over a local file of twelve documents."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"q": f"{i} plus 1 is", "c": [str(i + 1), str(i + 5)], "a": 0}) + "\n"
            for i in range(12)
        )
    )
    (tmp_path / "toy.yaml").write_text(
        "task: toy_choice\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {rows}}}, cache_dir: {tmp_path / 'cache'}}}\n"
        "test_split: test\noutput_type: multiple_choice\n"
        'doc_to_text: "{{q}}"\ndoc_to_choice: "{{c}}"\ndoc_to_target: a\n'
        "metric_list:\n  - {metric: acc, aggregation: mean, higher_is_better: true}\n"
    )
    return tmp_path


@pytest.fixture
def harness():
    pytest.importorskip("lm_eval", reason="the extra tunegate[lm-eval] is not installed")


def test_results_become_metrics_with_normal_intervals():
    metrics = metrics_of_results(RESULTS)
    assert set(metrics) == {
        "lm_eval.arc_easy.acc",
        "lm_eval.arc_easy.acc_norm",
        "lm_eval.gsm8k.exact_match.strict-match",
    }
    accuracy = metrics["lm_eval.arc_easy.acc"]
    assert (accuracy.value, accuracy.n) == (0.5, 8)
    assert accuracy.high - accuracy.value == pytest.approx(1.959964 * 0.1889822365046136)


def test_a_value_without_standard_error_has_no_interval():
    found = metrics_of_results(RESULTS)["lm_eval.arc_easy.acc_norm"]
    assert (found.value, found.low, found.high) == (0.25, None, None)


def test_a_missing_harness_names_the_extra(monkeypatch, model, tokenizer):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(LmEvalMissingError, match=r"pip install 'tunegate\[lm-eval\]'"):
        run_tasks(model, tokenizer, ["arc_easy"])


@pytest.mark.parametrize(("tasks", "limit"), [([], None), (["arc_easy"], 0)])
def test_nothing_to_run_is_refused(model, tokenizer, tasks, limit):
    with pytest.raises(ValueError, match="at least 1"):
        run_tasks(model, tokenizer, tasks, limit)


@pytest.mark.slow
@pytest.mark.usefixtures("harness")
def test_a_local_task_runs_and_leaves_mode_and_random_states_alone(model, tokenizer, toy_task):
    model.model.layers[0].train()
    before = [module.training for module in model.modules()]
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    try:
        metrics = run_tasks(model, tokenizer, ["toy_choice"], 8, include=toy_task)
        after = [module.training for module in model.modules()]
    finally:
        model.eval()
    accuracy = metrics["lm_eval.toy_choice.acc"]
    assert accuracy.n == 8
    assert 0 <= accuracy.value <= 1
    assert after == before
    now = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert now == states


@pytest.mark.slow
@pytest.mark.usefixtures("harness")
def test_an_unknown_task_is_named(model, tokenizer, toy_task):
    with pytest.raises(LmEvalTaskError, match="no task toy_choise"):
        run_tasks(model, tokenizer, ["toy_choise"], 2, include=toy_task)
