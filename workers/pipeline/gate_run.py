"""A gate run: a model that is there already is asked the same as its base, and judged.

Nothing is tuned and nothing is released. A second run with the same work folder goes on where the
first one ended.
"""

import json
import platform
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import peft
import pyarrow.parquet as pq
import torch
import transformers
from pydantic import ValidationError

from evaluators.gate.policy import Policy
from evaluators.gate.recheck import REPORT_VERSION
from evaluators.gate.shortfall import suite_shortfalls
from evaluators.gate.verdict import GateDecision, decide
from evaluators.metric import Metric, undefined
from jobspec.catalogue import HubSource
from jobspec.gate_run import GateRunSpec
from workers.pipeline.artifact import load_tokenizer
from workers.pipeline.bundle import MANIFEST, REPORT, SAMPLES
from workers.pipeline.emit import Emit
from workers.pipeline.evaluate import (
    Evaluated,
    Judges,
    Measurement,
    evaluation_report,
    group_metrics_of,
    load_judges,
    metrics_of,
    utility_metrics,
)
from workers.pipeline.failure import PipelineFailure, Stopped
from workers.pipeline.folders import write_folder
from workers.pipeline.gate_compare import NO_TASK, Asking, Compared, Models, compare, models_of
from workers.pipeline.gate_data import GateData, read_data
from workers.pipeline.hashing import file_sha256
from workers.pipeline.samples import sample_table
from workers.pipeline.stages import Stages, policy_of

RESULT = "result"
SUMMARY = ("metrics", "base_metrics", "gate", "base_gate", "artifact", "timings")

Metrics = dict[str, Metric]


class Judged(NamedTuple):
    """Metrics and decisions of the model, and of its base where there is one."""

    metrics: Metrics
    groups: Mapping[str, Metrics]
    decision: GateDecision
    base_metrics: Metrics
    base_decision: GateDecision | None


def run_gate(
    spec: GateRunSpec,
    work: Path,
    emit: Emit,
    stop: Callable[[], bool],
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure, judge, and write report.json and evaluation_samples.parquet into `work`/result, and
    copies of them into `out`.

    Raises PipelineFailure (a reason for the person who asked) and Stopped (`stop()` turned true).
    """
    work.mkdir(parents=True, exist_ok=True)
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    policy = policy_of(spec.policy, spec.evaluation)
    stages = Stages(emit)

    with stages.stage("validating"):
        models = models_of(spec)
        data = read_data(spec, models.subject, load_tokenizer(models.subject))
        judges = load_judges(spec.evaluation)
        if stop():
            raise Stopped

    with stages.stage("evaluating"):
        asking = Asking(spec, models, data, judges, policy, work, emit, stop, stages.timed)
        compared = compare(asking)

    with stages.stage("gating"):
        judged = _judge(spec, compared, policy, judges)

    with stages.stage("publishing"):
        models.artifact.check_unchanged()
        report = _report(spec, models, compared, data, judges, judged, stages.seconds)
        _write(work / RESULT, report, compared.evaluated, judges)
        if out is not None:
            _copy_result(work / RESULT, out)
    emit(
        "result",
        verdict=judged.decision.verdict,
        bundle=str(work / RESULT),
        report={key: report[key] for key in SUMMARY},
    )
    return report


def _judge(spec: GateRunSpec, compared: Compared, policy: Policy, judges: Judges) -> Judged:
    measured, reference, plan = compared.evaluated[:3]
    short = suite_shortfalls(plan.suites)
    metrics = _metrics(measured, reference, compared, judges) | _known(spec)
    groups = group_metrics_of(measured, reference, plan, judges.scorer)
    base_metrics: Metrics = {}
    base_decision = None
    if reference is not None:
        base_metrics = _metrics(reference, reference, compared, judges)
        base_groups = group_metrics_of(reference, reference, plan, judges.scorer)
        base_decision = decide(policy, base_metrics, base_groups, short)
    return Judged(
        metrics, groups, decide(policy, metrics, groups, short), base_metrics, base_decision
    )


def _metrics(
    measured: Measurement, reference: Measurement | None, compared: Compared, judges: Judges
) -> Metrics:
    plan = compared.evaluated.plan
    if compared.comparable_loss or plan.utility.kind != "perplexity":
        return metrics_of(measured, reference, plan, judges.scorer)
    found = metrics_of(measured, reference, plan._replace(utility=NO_TASK), judges.scorer)
    if measured is not reference:
        found |= utility_metrics(measured, None, plan)
    found["utility.change_vs_base"] = undefined(
        0, "the two models have different tokens, so their losses a token do not compare"
    )
    return found


def _known(spec: GateRunSpec) -> Metrics:
    """Metrics that were measured while the model was tuned."""
    try:
        return {name: Metric.model_validate(value) for name, value in spec.measured.items()}
    except ValidationError as error:
        raise PipelineFailure(
            "invalid_spec", f"measured: not a metric: {error.errors()[0]['msg']}"
        ) from error


def _report(
    spec: GateRunSpec,
    models: Models,
    compared: Compared,
    data: GateData,
    judges: Judges,
    judged: Judged,
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    evaluated = compared.evaluated
    return {
        "version": REPORT_VERSION,
        "kind": "gate_run",
        "job_id": spec.run_id,
        "seed": spec.seed,
        "model": _model_report(spec, models, compared),
        "data": data.report,
        "metrics": _dumped(judged.metrics),
        "base_metrics": _dumped(judged.base_metrics),
        "group_metrics": {name: _dumped(by_group) for name, by_group in judged.groups.items()},
        "gate": judged.decision.model_dump(mode="json"),
        "base_gate": None
        if judged.base_decision is None
        else judged.base_decision.model_dump(mode="json"),
        "evaluation": evaluation_report(
            evaluated.plan,
            judges.scorer,
            judges.harm,
            evaluated.measured,
            evaluated.reference,
            evaluated.stopped_early,
        ),
        "artifact": models.artifact.report(),
        "timings": dict(seconds),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
        },
    }


def _model_report(spec: GateRunSpec, models: Models, compared: Compared) -> dict[str, Any]:
    """name: the model, or the one under the adapter. compared_with: what changes are measured
    against; None: nothing."""
    base = models.subject if models.base is None else models.base
    found = {
        "name": models.subject.name,
        "fingerprint": compared.fingerprint,
        "base_fingerprint": compared.base_fingerprint,
        "lineage": [models.subject.name, *spec.lineage],
        "compared_with": None if compared.evaluated.reference is None else base.name,
    }
    if isinstance(spec.model.source, HubSource):
        # A snapshot's folder is named by the commit that the revision stood for.
        commit = models.folder.name
        found |= {"repository": spec.model.source.repository, "commit": commit}
    return found


def _dumped(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    return {name: metric.model_dump(mode="json") for name, metric in metrics.items()}


def _write(target: Path, report: Mapping[str, Any], evaluated: Evaluated, judges: Judges) -> None:
    """Report, samples and a manifest of both; the folder exists only when it is whole."""
    answers = {"tuned": evaluated.measured.answers}
    if evaluated.reference is not None:
        answers = {"base": evaluated.reference.answers, **answers}

    def fill(aside: Path) -> None:
        pq.write_table(sample_table(answers, judges.scorer, judges.harm), aside / SAMPLES)
        text = json.dumps(report, indent=2, allow_nan=False)
        (aside / REPORT).write_text(text + "\n", "utf-8")
        manifest = {
            "files": {
                name: {"sha256": file_sha256(aside / name), "bytes": (aside / name).stat().st_size}
                for name in (SAMPLES, REPORT)
            }
        }
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")

    write_folder(target, fill)


def _copy_result(result: Path, out: Path) -> None:
    """Put the result where a person looks for it; the report last, and each file at once."""
    out.mkdir(parents=True, exist_ok=True)
    for name in (SAMPLES, REPORT):
        draft = out / f".{name}.part"
        shutil.copyfile(result / name, draft)
        draft.replace(out / name)
