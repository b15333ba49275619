"""The evaluation's block of report.json: what was asked, who judged, and what came of each part."""

from collections.abc import Mapping, Sequence
from typing import Any

from evaluators.diversity.intra import DiversityResult
from evaluators.harmfulness.contract import HarmJudge
from evaluators.harmfulness.judge import HarmfulnessSample
from evaluators.harmfulness.metrics import harmfulness_metrics, outcome_counts
from evaluators.harmfulness.parts import WORSE_IS_HIGHER
from evaluators.harmfulness.scorer import EmbeddedScorer
from evaluators.metric import Metric
from evaluators.sweep import Condition
from evaluators.templates import ALPACA, SERVING
from workers.pipeline.evaluation_metrics import diversity_of
from workers.pipeline.evaluation_plan import OPEN_SETTING, EvaluationPlan, judge_options
from workers.pipeline.measurement import Measurement
from workers.pipeline.stopping import StoppedEarly

NOT_COMPARABLE = (
    "The protocol's own prompts were not given (evaluation.suites), so the shipped ones were "
    "asked: these scores cannot be compared with published ones."
)


def evaluation_report(
    plan: EvaluationPlan,
    scorer: EmbeddedScorer,
    judge: HarmJudge,
    measured: Measurement,
    reference: Measurement | None,
    stopped_early: StoppedEarly | None = None,
) -> dict[str, Any]:
    """Plain values, without any prompt or answer."""
    models = {"tuned": measured} | ({} if reference is None else {"base": reference})
    return {
        "scorer": {
            "id": scorer.id,
            "version": scorer.version,
            "threshold": scorer.threshold,
            "coefficients_sha256": scorer.coefficients_sha256,
        },
        "judge": {
            "id": judge.id,
            "version": judge.version,
            "threshold": judge.threshold,
            "fingerprint": judge.fingerprint,
            "hosts": list(judge.hosts),
            "card": dict(judge.card),
        },
        "embedder": scorer.embedder.id,
        "prompt_sets": dict(plan.prompt_sets),
        "suites": [dict(suite) for suite in plan.suites],
        "outcomes": {name: _outcomes(model) for name, model in models.items()},
        "templates": _templates(plan, measured, reference),
        "conditions": [
            _condition(condition, measured, reference, plan.seed) for condition in plan.conditions
        ],
        "conditions_left_out": [
            {"id": condition.id, "kind": condition.kind} for condition in plan.left_out
        ],
        "protocol": _protocol(plan, measured, reference),
        "stopped_early": None if stopped_early is None else stopped_early.model_dump(),
        "diversity": _diversity(diversity_of(measured, reference, plan, scorer)),
        "utility": {
            "kind": plan.utility.kind,
            "source": plan.utility.source,
            "rows": len(plan.utility.rows),
        },
        "options": plan.options.model_dump(mode="json"),
    }


def _diversity(found: DiversityResult) -> dict[str, Any]:
    """The numbers of each open question and over all of them, on the embedder's own scale."""
    return {"setting": OPEN_SETTING, **found.model_dump(mode="json", exclude={"metrics"})}


def _outcomes(model: Measurement) -> dict[str, Any]:
    """Counts of what became of every judged answer, by part of the evaluation."""
    parts: dict[str, Sequence[HarmfulnessSample]] = {
        "training_template": model.templated,
        "stress": model.stressed,
        "sweep": [sample for samples in model.swept.values() for sample in samples],
    }
    found: dict[str, Any] = dict(outcome_counts(model.samples))
    found |= {
        part: dict(outcome_counts(samples))["harmful"] for part, samples in parts.items() if samples
    }
    return found


def _templates(
    plan: EvaluationPlan, measured: Measurement, reference: Measurement | None
) -> list[dict[str, Any]]:
    """Each layout under which harmful prompts were asked, with its own numbers."""
    serving = SERVING if plan.protocol is None else ALPACA
    base = (None, None) if reference is None else (reference.samples, reference.templated)
    found = [("serving", serving, measured.samples, base[0])]
    if plan.training is not None:
        found.append(("training", plan.training, measured.templated, base[1]))
    return [
        {
            "id": name,
            **layout.describe(),
            "metrics": _dumped(harmfulness_metrics(samples, compared, seed=plan.seed)),
        }
        for name, layout, samples, compared in found
    ]


def _dumped(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    return {
        name: metric.model_dump(mode="json")
        for name, metric in metrics.items()
        if name in WORSE_IS_HIGHER
    }


def _condition(
    condition: Condition, measured: Measurement, reference: Measurement | None, seed: int
) -> dict[str, Any]:
    def score(samples: Sequence[HarmfulnessSample]) -> Metric:
        return harmfulness_metrics(samples, seed=seed)["harmfulness.score"]

    tuned = score(measured.swept.get(condition.id, ()))
    base = None if reference is None else score(reference.swept.get(condition.id, ()))
    return {
        "id": condition.id,
        "kind": condition.kind,
        "n": tuned.n,
        "score": tuned.value,
        "base_score": None if base is None else base.value,
    }


def _protocol(
    plan: EvaluationPlan, measured: Measurement, reference: Measurement | None
) -> dict[str, Any] | None:
    """HS and HS+ in percent as the papers give them, where a protocol was followed."""
    if plan.protocol is None:
        return None
    about: dict[str, Any] = {"name": plan.protocol.name, "source": plan.protocol.source}
    if plan.protocol_prompts is None:
        return about | {"comparable": False, "note": NOT_COMPARABLE}
    models = {"tuned": measured} | ({} if reference is None else {"base": reference})
    for name, model in models.items():
        harmful = [sample for sample in model.samples if sample.kind == "harmful"]
        scores = plan.protocol.scores(harmful, plan.protocol_prompts, seed=plan.seed)
        about[name] = {key: metric.model_dump(mode="json") for key, metric in scores.items()}
    own_judge = judge_options(plan.options).name == plan.protocol.judge.name and (
        getattr(judge_options(plan.options), "preset", None) == plan.protocol.judge.preset
    )
    return about | {"comparable": own_judge and plan.protocol_prompts.shortfall == 0}
