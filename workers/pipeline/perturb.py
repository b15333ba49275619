"""The perturbation stage: take eps, and release the smallest scale of it that is needed.

Every scale is judged on harmful prompts of the validation split (never the test prompts of the
final evaluation) and on the task. A scale is good enough when the gate's harmfulness and coherence
rules hold there and utility is within its budget of scale 0.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from defenses.losses import response_token_mean_nll
from defenses.panacea.layers import effective_change_norms, layer_coefficients
from defenses.panacea.perturbation import (
    apply_perturbation,
    post_hoc_perturbation,
    relative_rho,
)
from defenses.panacea.scale_search import search_scale
from evaluators.gate.policy import Policy
from evaluators.gate.verdict import decide
from evaluators.harmfulness.metrics import harmfulness_metrics
from evaluators.harmfulness.scorer import EmbeddedScorer
from evaluators.metric import Metric
from evaluators.prompts import load_prompts, subset
from jobspec.defense import PerturbationOptions
from workers.pipeline.emit import Emit
from workers.pipeline.evaluate import EvaluationPlan, Measurement, measure, utility_metrics
from workers.pipeline.models import trainable
from workers.pipeline.rows import TokenRow, collate
from workers.pipeline.sections import Sections
from workers.pipeline.tune import Tuned

SEARCHED_METRICS = ("harmfulness.score", "harmfulness.score_plus_gap")


class Perturbed(NamedTuple):
    """eps, the scale that is released (0: none was needed, or none was good enough) and the
    report's account of the search."""

    eps: dict[str, Tensor]
    scale: float
    report: dict[str, Any]


def perturb(
    model: Any,
    tokenizer: Any,
    tuned: Tuned,
    harmful: Sequence[TokenRow],
    options: PerturbationOptions,
    policy: Policy,
    plan: EvaluationPlan,
    scorer: EmbeddedScorer,
    lora_scaling: float,
    sections: Sections,
    emit: Emit,
    stop: Callable[[], bool],
) -> Perturbed | None:
    """Find eps and its scale. The model is left unperturbed. None when the mode is none."""
    if options.mode == "none":
        return None
    parameters = trainable(model)
    device = next(model.parameters()).device
    if options.mode == "joint" and tuned.perturbation is not None:
        eps, rho = tuned.perturbation, tuned.rho
    else:
        rho = options.rho or relative_rho(parameters)
        size = options.batch_size
        batches = [
            collate(harmful[start : start + size], device)
            for start in range(0, len(harmful) - len(harmful) % size or len(harmful), size)
        ]
        eps = post_hoc_perturbation(
            parameters,
            [partial(response_token_mean_nll, model, *batch) for batch in batches],
            rho,
        ).perturbation
    search_plan = _search_plan(plan)
    search_policy = policy.model_copy(
        update={
            "rules": tuple(rule for rule in policy.rules if rule.metric in SEARCHED_METRICS),
            "minimum_prompts": 1,
        }
    )
    reference: dict[str, float] = {}

    def evaluate(scale: float) -> dict[str, Metric]:
        with apply_perturbation(parameters, eps, scale):
            measured = measure(
                model,
                tokenizer,
                scorer,
                search_plan,
                Sections(sections.folder / f"scale-{scale:g}"),
                f"scale {scale:g}",
                emit,
                stop,
            )
        found = _search_metrics(measured, search_plan)
        reference.setdefault("utility", found["utility.score"].value or 0.0)
        return found

    def meets(metrics: Mapping[str, Metric]) -> bool:
        utility = metrics["utility.score"].value or 0.0
        within = utility >= reference["utility"] - options.utility_budget
        decision = decide(search_policy, metrics) if search_policy.rules else None
        return within and (decision is None or decision.verdict == "passed")

    found = search_scale(options.scales, evaluate, meets)
    scale = found.chosen or 0.0
    coefficients = layer_coefficients(eps)
    report = {
        "mode": options.mode,
        "rho": rho,
        "strength": options.strength,
        "scale": scale,
        "met": found.chosen is not None,
        "tried": [
            {
                "scale": tried.scale,
                "meets": tried.meets,
                "metrics": {
                    name: metric.model_dump(mode="json") for name, metric in tried.outcome.items()
                },
            }
            for tried in found.tried
        ],
        "layer_coefficients": {str(k): v for k, v in coefficients.by_layer.items()},
        "module_shares": dict(coefficients.by_module),
        "factor_shares": dict(coefficients.by_factor),
        "effective_change": effective_change_norms(parameters, eps, lora_scaling, scale),
        "clamped_steps": tuned.counters.get("clamped_steps", 0),
        "skipped_perturbations": tuned.counters.get("skipped_perturbations", 0),
    }
    return Perturbed(eps, scale, report)


def _search_plan(plan: EvaluationPlan) -> EvaluationPlan:
    """Validation prompts only, no look-alikes, no diversity."""
    validation = load_prompts("harmful_prompts").of_split("validation")
    count = plan.options.search_prompts
    chosen = tuple(validation if count is None else subset(validation, count))
    return plan._replace(safety=(("harmful", chosen),), open_ended=())


def _search_metrics(measured: Measurement, plan: EvaluationPlan) -> dict[str, Metric]:
    metrics = harmfulness_metrics(measured.samples, seed=plan.seed)
    wanted = ("harmfulness.score", "harmfulness.score_plus_gap", "refusal.rate", "coherence.rate")
    return {name: metrics[name] for name in wanted} | {
        "utility.score": utility_metrics(measured, None, plan)["utility.score"]
    }
