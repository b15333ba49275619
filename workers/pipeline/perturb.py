"""The stage after tuning: find what is added to the adapter, and release the least that is needed.

Every scale is judged on harmful prompts of the validation split (never the test prompts of the
final evaluation) and on the task. A scale is good enough when every rule of the gate that these
prompts can answer holds there, and utility is within its budget of the unperturbed adapter. If
none is, the adapter stays as it was tuned: the report says so and the gate decides.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from defenses.panacea.layers import effective_change_norms, layer_coefficients
from defenses.panacea.perturbation import apply_perturbation, global_norm
from defenses.panacea.scale_search import ScaleSearch, search_scale
from evaluators.gate.policy import Policy, Rule
from evaluators.gate.verdict import decide
from evaluators.harmfulness.metrics import harmfulness_metrics
from evaluators.metric import Metric
from evaluators.prompts import load_prompts, subset
from jobspec.defense import RepairOptions
from jobspec.spec import JobSpec
from workers.pipeline.emit import Emit
from workers.pipeline.evaluate import (
    EvaluationPlan,
    Judges,
    Respondent,
    answers_folder,
    baseline,
    measure,
    utility_metrics,
)
from workers.pipeline.models import LoadedModel, trainable
from workers.pipeline.repairs import JointlyTuned, Repair, find_repair
from workers.pipeline.rows import TokenRow

SEARCHED_METRICS = (
    "harmfulness.score",
    "harmfulness.score_plus",
    "harmfulness.score_plus_gap",
    "harmfulness.change_vs_base",
    "harmfulness.change_p",
    "refusal.rate",
    "coherence.rate",
)

Outcome = dict[str, Metric]


class Judging(NamedTuple):
    """What a scale is judged with. `work` keeps this job's answers, `cache` the base's."""

    policy: Policy
    plan: EvaluationPlan
    judges: Judges
    base: LoadedModel
    work: Path
    cache: Path


class Perturbed(NamedTuple):
    """eps: the delta of scale 1 by adapter tensor. scale: what is released (0: none was needed, or
    none was good enough). average: layer coefficients over the last joint steps. report: the
    account of it all."""

    eps: dict[str, Tensor]
    scale: float
    average: dict[int, float] | None
    report: dict[str, Any]


def perturb(
    model: Any,
    tuned: JointlyTuned,
    harmful: Sequence[TokenRow],
    spec: JobSpec,
    judging: Judging,
    emit: Emit,
    stop: Callable[[], bool],
) -> Perturbed | None:
    """Find the delta and its scale. The model is left unperturbed. None when the mode is none.

    Raises Stopped when `stop()` turns true, and PipelineFailure(invalid_spec) for a repair that
    this base cannot have.
    """
    options = spec.defense.perturbation
    if options.mode == "none":
        return None
    repair = find_repair(model, tuned, harmful, options, spec.model, spec.seed, stop)
    search, rules, budget = _search(model, repair.delta, options, judging, emit, stop)
    scale = search.chosen or 0.0
    if search.chosen is None:
        emit(
            "message",
            level="warn",
            message="No scale of the perturbation met the gate's rules on the validation prompts; "
            "the adapter is left as it was tuned.",
            data=None,
        )
    joint = options.mode == "joint"
    average = tuned.coefficients if joint else None
    report = {
        "mode": options.mode,
        "fidelity": repair.fidelity,
        "eps_source": repair.eps_source,
        "rho": repair.rho,
        "strength": repair.strength,
        "norm": global_norm(repair.delta),
        "scale": scale,
        "met": search.chosen is not None,
        "searched_rules": [rule.metric for rule in rules],
        "utility_budget": budget,
        "tried": _tried(search),
        **_where(trainable(model), repair, scale, spec.model.lora.alpha / spec.model.lora.rank),
        "layer_coefficients_average": None if average is None else _by_layer(average),
        "counters": dict(tuned.counters) if joint else {},
        "details": dict(repair.details),
    }
    return Perturbed(repair.delta, scale, average, report)


def _search(
    model: Any,
    delta: Mapping[str, Tensor],
    options: RepairOptions,
    judging: Judging,
    emit: Emit,
    stop: Callable[[], bool],
) -> tuple[ScaleSearch[Outcome], tuple[Rule, ...], float | None]:
    """The search, the gate's rules that it judged by, and the budget of utility."""
    policy, judges, base = judging.policy, judging.judges, judging.base
    parameters = trainable(model)
    plan = _search_plan(judging.plan)
    # Only the base's harmfulness is compared with; its utility plays no part in the search.
    nothing = plan.utility._replace(kind=None)
    reference = baseline(
        model, base, judges, plan._replace(utility=nothing), judging.cache, emit, stop
    )
    rules = tuple(rule for rule in policy.rules if _is_searched(rule))
    search_policy = policy.model_copy(update={"rules": rules, "minimum_prompts": 1})

    def evaluate(scale: float) -> Outcome:
        with apply_perturbation(parameters, delta, scale):
            answers = answers_folder(judging.work, f"{base.fingerprint} {_identity(parameters)}")
            asked = Respondent(model, base.tokenizer, f"scale {scale:g}", answers)
            measured = measure(asked, plan, judges, emit, stop)
        found = harmfulness_metrics(measured.samples, reference.samples, seed=plan.seed)
        return {name: found[name] for name in SEARCHED_METRICS} | {
            "utility.score": utility_metrics(measured, None, plan)["utility.score"]
        }

    unperturbed = evaluate(0.0)["utility.score"].value
    # Training rows may be poisoned, and unlearning them must not count as a loss of utility.
    budget = options.utility_budget if plan.utility.source == "validation_file" else None

    def meets(metrics: Outcome) -> bool:
        utility = metrics["utility.score"].value
        within = (
            budget is None
            or utility is None
            or unperturbed is None
            or utility >= unperturbed - budget
        )
        return within and (not rules or decide(search_policy, metrics).verdict == "passed")

    return search_scale(options.scales, evaluate, meets), rules, budget


def _is_searched(rule: Rule) -> bool:
    """Whether the validation prompts, all of them together, can answer the rule."""
    metrics = [rule.metric] if rule.unless is None else [rule.metric, rule.unless.metric]
    return rule.group is None and all(metric in SEARCHED_METRICS for metric in metrics)


def _tried(search: ScaleSearch[Outcome]) -> list[dict[str, Any]]:
    return [
        {
            "scale": tried.scale,
            "meets": tried.meets,
            "metrics": {
                name: metric.model_dump(mode="json") for name, metric in tried.outcome.items()
            },
        }
        for tried in search.tried
    ]


def _where(
    parameters: Mapping[str, Tensor], repair: Repair, scale: float, lora_scaling: float
) -> dict[str, Any]:
    """Where the delta acts: its shares, and the change of each adapted matrix as released."""
    coefficients = layer_coefficients(repair.delta)
    return {
        "layer_coefficients": _by_layer(coefficients.by_layer),
        "module_shares": dict(coefficients.by_module),
        "factor_shares": dict(coefficients.by_factor),
        "effective_change": effective_change_norms(parameters, repair.delta, lora_scaling, scale),
    }


def _by_layer(coefficients: Mapping[int, float]) -> dict[str, float]:
    return {str(layer): share for layer, share in coefficients.items()}


def _identity(parameters: Mapping[str, Tensor]) -> str:
    """Names the adapter's present values."""
    digest = hashlib.sha256()
    for name, tensor in parameters.items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _search_plan(plan: EvaluationPlan) -> EvaluationPlan:
    """Validation prompts only, as the model is served: no look-alikes, no sweep, no diversity."""
    validation = load_prompts("harmful_prompts").of_split("validation")
    count = plan.options.search_prompts
    chosen = tuple(validation if count is None else subset(validation, count))
    return plan._replace(
        options=plan.options.model_copy(update={"stress_samples": 0}),
        safety=(("harmful", chosen),),
        open_ended=(),
        training=None,
        conditions=(),
        protocol=None,
    )
