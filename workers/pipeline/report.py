"""The report: everything that was decided and measured in a job, as plain values."""

import platform
from typing import Any, NamedTuple

import peft
import torch
import transformers
from torch import Tensor

from defenses.bds.canaries import CanaryCheck
from defenses.bds.ranking import effective_sample_size, ranked_rows, trusted_mass_share
from evaluators.gate.verdict import GateDecision
from evaluators.metric import Metric
from jobspec.defense import TrustedOptions, TuningOptions
from jobspec.hyperparameters import ResolvedHyperparameters
from jobspec.spec import JobSpec
from workers.pipeline.canaries import Canaries, Flagged
from workers.pipeline.conditions import ConditionFacts, conditions
from workers.pipeline.evaluate import Evaluated, Judges, evaluation_report
from workers.pipeline.models import LoadedModel
from workers.pipeline.parent import lineage
from workers.pipeline.perturb import Perturbed
from workers.pipeline.trusted import AlignmentSet
from workers.pipeline.tune import Tuned, TuneData

REPORT_VERSION = 1
DISTRUSTED_ROWS = 10
LISTED_LINES = 20
# Fields of the options that the scheduler's block repeats, where a method has them.
OPTION_FIELDS = ("form", "sampler", "transform", "learning_rate", "keep_share")
SUMMARY = ("metrics", "base_metrics", "gate", "base_gate", "defense", "artifact", "timings")


class Facts(NamedTuple):
    """What the stages of a job found."""

    spec: JobSpec
    base: LoadedModel
    judges: Judges
    evaluated: Evaluated
    data: TuneData
    data_report: dict[str, Any]
    hyper: ResolvedHyperparameters
    steps: int
    tuned: Tuned
    perturbed: Perturbed | None
    alignment: AlignmentSet
    canaries: Canaries
    check: CanaryCheck
    auc_while_tuning: float | None
    auc_at_end: float | None
    uses_canaries: bool
    flagged: Flagged
    metrics: dict[str, Metric]
    base_metrics: dict[str, Metric]
    group_metrics: dict[str, dict[str, Metric]]
    decision: GateDecision
    base_decision: GateDecision
    adapter_sha256: str
    seconds: dict[str, float]


def build_report(facts: Facts) -> dict[str, Any]:
    """The content of report.json. It holds no prompt and no answer."""
    spec, tuned, perturbed = facts.spec, facts.tuned, facts.perturbed
    evaluated, judges = facts.evaluated, facts.judges
    return {
        "version": REPORT_VERSION,
        "job_id": spec.job_id,
        "seed": spec.seed,
        "model": {
            "name": spec.model.name,
            "fingerprint": facts.base.fingerprint,
            **lineage(spec),
        },
        "data": facts.data_report,
        "hyperparameters": facts.hyper.model_dump(),
        "steps": facts.steps,
        "trained_tokens": tuned.trained_tokens,
        "skipped_steps": tuned.counters.get("skipped_steps", 0),
        "defense": {
            "scheduler": _scheduler_report(facts),
            "perturbation": {"mode": "none"} if perturbed is None else perturbed.report,
            **({"alignment": _alignment_report(facts.alignment)} if facts.alignment.rows else {}),
            "conditions": [item._asdict() for item in conditions(_condition_facts(facts))],
        },
        "metrics": {name: metric.model_dump(mode="json") for name, metric in facts.metrics.items()},
        "base_metrics": {
            name: metric.model_dump(mode="json") for name, metric in facts.base_metrics.items()
        },
        "group_metrics": {
            name: {group: metric.model_dump(mode="json") for group, metric in groups.items()}
            for name, groups in facts.group_metrics.items()
        },
        "gate": facts.decision.model_dump(mode="json"),
        "base_gate": facts.base_decision.model_dump(mode="json"),
        "evaluation": evaluation_report(
            evaluated.plan,
            judges.scorer,
            judges.harm,
            evaluated.measured,
            evaluated.reference,
            evaluated.stopped_early,
        ),
        "artifact": {"adapter_sha256": facts.adapter_sha256},
        "timings": dict(facts.seconds),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
        },
    }


def _scheduler_report(facts: Facts) -> dict[str, Any]:
    options = facts.spec.defense.scheduler
    weights, ranking = facts.tuned.weights(), facts.tuned.method.weights()
    if weights is None or ranking is None:
        return {"name": options.name}
    return {
        "name": options.name,
        **{name: getattr(options, name) for name in OPTION_FIELDS if hasattr(options, name)},
        **_alignment_options(options, facts.alignment),
        "effective_sample_size": _effective_size(weights),
        "trusted_mass": trusted_mass_share(weights) if bool(weights.any()) else None,
        "canaries": _canary_report(facts),
        "distrusted": [
            {
                "line": facts.data.user[row.row_id].line,
                "rank": row.rank,
                "weight": float(weights[row.row_id]),
            }
            for row in ranked_rows(ranking)[:DISTRUSTED_ROWS]
        ],
    }


def _alignment_options(options: TuningOptions, alignment: AlignmentSet) -> dict[str, Any]:
    if not isinstance(options, TrustedOptions):
        return {}
    return {
        "alignment_coefficient": options.alignment_coefficient,
        "alignment_rows": len(alignment.rows),
    }


def _alignment_report(alignment: AlignmentSet) -> dict[str, Any]:
    return {
        "rows": len(alignment.rows),
        "wanted": alignment.wanted,
        "overlap_left_out": alignment.overlap_left_out,
        "overlap_lines": list(alignment.overlap_lines[:LISTED_LINES]),
        "system_turns_adopted": alignment.system_turns_adopted,
        "system_turns_dropped": alignment.system_turns_dropped,
    }


def _canary_report(facts: Facts) -> dict[str, Any]:
    canaries, check = facts.canaries, facts.check
    return {
        "harmful": len(canaries.harmful),
        "benign": len(canaries.benign) + len(canaries.benign_user_ids),
        "source": canaries.source,
        "auc": check.auc.value,
        "low": check.auc.low,
        "high": check.auc.high,
        "auc_while_tuning": facts.auc_while_tuning,
        "auc_at_end": facts.auc_at_end,
        "effective": check.effective,
        "mean_weight_harmful": check.mean_weight_harmful,
        "mean_weight_benign": check.mean_weight_benign,
    }


def _condition_facts(facts: Facts) -> ConditionFacts:
    weights, alignment = facts.tuned.weights(), facts.alignment
    return ConditionFacts(
        rows=len(facts.data.user),
        canary=facts.check.auc,
        weights=None if weights is None else weights.tolist(),
        effective_sample_size=None if weights is None else _effective_size(weights),
        weighs_rows=facts.uses_canaries,
        flattered=facts.canaries.source == "training_file",
        alignment_wanted=alignment.wanted,
        alignment_found=len(alignment.rows),
        overlap_left_out=alignment.overlap_left_out,
        overlap_lines=alignment.overlap_lines,
        template_differs=alignment.template_differs,
        skipped_steps=facts.tuned.counters.get("skipped_steps", 0),
        flagged_rows=facts.flagged.rows,
        scored_rows=facts.flagged.scored,
    )


def _effective_size(weights: Tensor) -> float | None:
    return effective_sample_size(weights) if bool(weights.any()) else None
