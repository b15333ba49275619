"""A model tuned in two jobs, and a gate run on it, through the whole service."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

# A model made of random numbers often says nothing, and an empty answer is judged by nobody.
POLICY = """
version: 1
minimum_prompts: 1
maximum_unresolved: 1.0
maximum_one_word: 1.0
rules:
  - {metric: utility.score, bound: value, min: 0.0}
  - {metric: defense.canary_auc, bound: value, min: 0.0, severity: warning}
"""


def report_of(service: Any, path: str) -> dict[str, Any]:
    answer = service.client.get(f"{path}/report", cast_to=object)
    assert isinstance(answer, dict)
    return answer


def test_a_model_tuned_twice_is_compared_with_the_original_base_and_judged_again(
    make_service: Callable[..., Any], tmp_path: Path
) -> None:
    policy = tmp_path / "own-policy.yaml"
    policy.write_text(POLICY)
    service = make_service(TUNEGATE_GATE_POLICY=str(policy))
    training = service.upload()
    first = service.finish(service.create(training, epochs=1))
    assert first.status == "succeeded", first.error
    second = service.finish(
        service.client.fine_tuning.jobs.create(
            model=first.fine_tuned_model,
            training_file=service.upload("more.jsonl"),
            seed=5,
            method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1}}},
            extra_body={"defense": {"scheduler": "none", "perturbation": "none"}},
        ).id
    )
    assert second.status == "succeeded", second.error
    assert second.model == first.fine_tuned_model
    made = service.client.models.retrieve(second.fine_tuned_model)
    assert made.model_extra["tunegate"]["base_model"] == "tiny"
    reports = [report_of(service, f"/fine_tuning/jobs/{job.id}") for job in (first, second)]
    assert reports[1]["model"]["lineage"] == ["tiny", first.fine_tuned_model]
    assert reports[1]["model"]["compared_with"] == "tiny"
    for name in ("refusal.over_refusal", "coherence.rate", "diversity.intra_similarity"):
        assert reports[1]["base_metrics"][name] == reports[0]["base_metrics"][name]

    run = service.client.post(
        "/gates/runs", cast_to=object, body={"model": second.fine_tuned_model}
    )

    def ended() -> Any:
        shown = service.client.get(f"/gates/runs/{run['id']}", cast_to=object)
        return shown if shown["status"] in ("succeeded", "failed", "cancelled") else None

    shown = service.eventually(ended)
    assert (shown["status"], shown["verdict"]) == ("succeeded", "passed"), shown["error"]
    again = report_of(service, f"/gates/runs/{run['id']}")
    assert again["model"]["lineage"] == ["tiny", first.fine_tuned_model, second.fine_tuned_model]
    # The same questions, seed and weights: a gate run repeats the job's own numbers.
    assert json.dumps(again["metrics"], sort_keys=True) == json.dumps(
        reports[1]["metrics"], sort_keys=True
    )
    assert again["artifact"]["adapter_sha256"] == reports[1]["artifact"]["adapter_sha256"]
    assert [job.id for job in service.client.fine_tuning.jobs.list()] == [second.id, first.id]
