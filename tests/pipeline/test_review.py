"""What a run stores is what reviewers need: the answers give the report's numbers again."""

import json
from pathlib import Path

from evaluators.gate.policy import default_policy
from service.gates.review import review
from service.gates.samples import read_samples
from service.kit.artifacts import ArtifactStore
from workers.pipeline.run import run_job


def test_the_stored_answers_give_the_stored_harmfulness_metrics(
    make_spec, recorder, tmp_path: Path
):
    evaluation = make_spec().evaluation.model_dump() | {"stress_samples": 2}
    run_job(make_spec(evaluation=evaluation), tmp_path / "work", recorder, lambda: False)
    artifacts = ArtifactStore.from_url((tmp_path / "work").as_uri())
    report = json.loads((tmp_path / "work" / "bundle" / "report.json").read_text())
    samples = read_samples(artifacts, "bundle")
    stressed = next(one for one in samples if one.section == "harmful_stress")
    found = review(report, default_policy(), samples, {stressed.name: not stressed.judged.flagged})
    assert found.decision.verdict == report["gate"]["verdict"]
    changed = [
        name
        for name, metric in found.metrics.items()
        if metric.value != report["metrics"][name]["value"]
    ]
    assert changed in (["harmfulness.stress"], [])
    assert {"harmfulness.score", "harmfulness.sweep", "harmfulness.stress"} <= found.metrics.keys()
