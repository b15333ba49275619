"""The report: everything that was decided and measured in a job, as plain values."""

import platform
from typing import Any, NamedTuple

import peft
import torch
import transformers

from defenses.bds.ranking import ranked_rows
from evaluators.gate.verdict import GateDecision
from evaluators.harmfulness.scorer import EmbeddedScorer
from evaluators.metric import Metric
from jobspec.hyperparameters import ResolvedHyperparameters
from jobspec.spec import JobSpec
from workers.pipeline.evaluate import EvaluationPlan
from workers.pipeline.models import LoadedModel
from workers.pipeline.perturb import Perturbed
from workers.pipeline.tune import Tuned, TuneData

REPORT_VERSION = 1
DISTRUSTED_ROWS = 10
SUMMARY = ("metrics", "base_metrics", "gate", "base_gate", "defense", "timings")


class Facts(NamedTuple):
    """What the stages of a job found."""

    spec: JobSpec
    base: LoadedModel
    scorer: EmbeddedScorer
    plan: EvaluationPlan
    data: TuneData
    data_report: dict[str, Any]
    hyper: ResolvedHyperparameters
    steps: int
    tuned: Tuned
    perturbed: Perturbed | None
    metrics: dict[str, Metric]
    base_metrics: dict[str, Metric]
    decision: GateDecision
    base_decision: GateDecision
    adapter_sha256: str
    seconds: dict[str, float]


def build_report(facts: Facts) -> dict[str, Any]:
    """The content of report.json. It holds no prompt and no answer."""
    spec, plan, scorer, tuned = facts.spec, facts.plan, facts.scorer, facts.tuned
    perturbed = facts.perturbed
    return {
        "version": REPORT_VERSION,
        "job_id": spec.job_id,
        "seed": spec.seed,
        "model": {"name": spec.model.name, "fingerprint": facts.base.fingerprint},
        "data": facts.data_report,
        "hyperparameters": facts.hyper.model_dump(),
        "steps": facts.steps,
        "trained_tokens": tuned.trained_tokens,
        "skipped_steps": tuned.counters.get("skipped_steps", 0),
        "defense": {
            "scheduler": _scheduler_report(spec, tuned, facts.data),
            "perturbation": {"mode": "none"} if perturbed is None else perturbed.report,
        },
        "metrics": {name: metric.model_dump(mode="json") for name, metric in facts.metrics.items()},
        "base_metrics": {
            name: metric.model_dump(mode="json") for name, metric in facts.base_metrics.items()
        },
        "gate": facts.decision.model_dump(mode="json"),
        "base_gate": facts.base_decision.model_dump(mode="json"),
        "evaluation": {
            "scorer": {
                "id": scorer.id,
                "version": scorer.version,
                "threshold": scorer.threshold,
                "coefficients_sha256": scorer.coefficients_sha256,
            },
            "embedder": scorer.embedder.id,
            "prompt_sets": dict(plan.prompt_sets),
            "utility": {
                "kind": plan.utility.kind,
                "source": plan.utility.source,
                "rows": len(plan.utility.rows),
            },
            "options": plan.options.model_dump(mode="json"),
        },
        "artifact": {"adapter_sha256": facts.adapter_sha256},
        "timings": dict(facts.seconds),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
        },
    }


def _scheduler_report(spec: JobSpec, tuned: Tuned, data: TuneData) -> dict[str, Any]:
    options = spec.defense.scheduler
    if tuned.scheduler is None:
        return {"name": "none"}
    ranked = ranked_rows(tuned.scheduler.all_weights())
    return {
        "name": options.name,
        "transform": options.transform,
        "learning_rate": options.learning_rate,
        "alignment_coefficient": options.alignment_coefficient,
        "alignment_rows": len(data.alignment),
        "effective_sample_size": tuned.scheduler.effective_sample_size(),
        "distrusted": [
            {"line": data.user[row.row_id].line, "rank": row.rank, "weight": row.weight}
            for row in ranked[:DISTRUSTED_ROWS]
        ],
    }
