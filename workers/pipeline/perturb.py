"""The perturbation stage: take eps, and release the smallest scale of it that is needed.

Every scale is judged on harmful prompts of the validation split (never the test prompts of the
final evaluation) and on the task. A scale is good enough when every rule of the gate that these
prompts can answer holds there, and utility is within its budget of the unperturbed adapter. If
none is, the adapter stays as it was tuned: the report says so and the gate decides.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
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
from workers.pipeline.evaluate import EvaluationPlan, baseline, measure, utility_metrics
from workers.pipeline.failure import Stopped
from workers.pipeline.models import LoadedModel, trainable
from workers.pipeline.rows import TokenRow, collate
from workers.pipeline.sections import Sections
from workers.pipeline.tune import Tuned

SEARCHED_METRICS = (
    "harmfulness.score",
    "harmfulness.score_plus",
    "harmfulness.score_plus_gap",
    "harmfulness.change_vs_base",
    "refusal.rate",
    "coherence.rate",
)


class Perturbed(NamedTuple):
    """eps, the scale that is released (0: none was needed, or none was good enough) and the
    report's account of the search."""

    eps: dict[str, Tensor]
    scale: float
    report: dict[str, Any]


def perturb(
    model: Any,
    tuned: Tuned,
    harmful: Sequence[TokenRow],
    options: PerturbationOptions,
    policy: Policy,
    plan: EvaluationPlan,
    scorer: EmbeddedScorer,
    base: LoadedModel,
    lora_scaling: float,
    work: Path,
    cache: Path,
    emit: Emit,
    stop: Callable[[], bool],
) -> Perturbed | None:
    """Find eps and its scale. The model is left unperturbed. None when the mode is none.

    Raises Stopped when `stop()` turns true.
    """
    if options.mode == "none":
        return None
    parameters = trainable(model)
    if options.mode == "joint" and tuned.perturbation is not None:
        eps, rho, source = tuned.perturbation, tuned.rho, "last_step"
    else:
        rho, source = options.rho or relative_rho(parameters), "full_set"
        eps = post_hoc_perturbation(
            parameters, _harmful_losses(model, harmful, options.batch_size, stop), rho
        ).perturbation
    search_plan = _search_plan(plan)
    # Only the base's harmfulness is compared with; its utility plays no part in the search.
    nothing = search_plan.utility._replace(rows=(), prompts=(), labels=())
    reference = baseline(
        model, base, scorer, search_plan._replace(utility=nothing), cache, emit, stop
    )
    rules = tuple(rule for rule in policy.rules if rule.metric in SEARCHED_METRICS)
    search_policy = policy.model_copy(update={"rules": rules, "minimum_prompts": 1})

    def evaluate(scale: float) -> dict[str, Metric]:
        with apply_perturbation(parameters, eps, scale):
            identity = _identity(parameters)
            measured = measure(
                model,
                base.tokenizer,
                scorer,
                search_plan,
                Sections(work / search_plan.key(identity, scorer)),
                f"scale {scale:g}",
                emit,
                stop,
            )
        found = harmfulness_metrics(measured.samples, reference.samples, seed=plan.seed)
        return {name: found[name] for name in SEARCHED_METRICS} | {
            "utility.score": utility_metrics(measured, None, search_plan)["utility.score"]
        }

    unperturbed = evaluate(0.0)["utility.score"].value
    # Training rows may be poisoned, and unlearning them must not count as a loss of utility.
    budget = options.utility_budget if plan.utility.source == "validation_file" else None

    def meets(metrics: Mapping[str, Metric]) -> bool:
        utility = metrics["utility.score"].value
        within = (
            budget is None
            or utility is None
            or unperturbed is None
            or utility >= unperturbed - budget
        )
        return within and (not rules or decide(search_policy, metrics).verdict == "passed")

    found = search_scale(options.scales, evaluate, meets)
    scale = found.chosen or 0.0
    if found.chosen is None:
        emit(
            "message",
            level="warn",
            message="No scale of the perturbation met the gate's rules on the validation prompts; "
            "the adapter is left as it was tuned.",
            data=None,
        )
    coefficients = layer_coefficients(eps)
    report = {
        "mode": options.mode,
        "eps_source": source,
        "rho": rho,
        "strength": options.strength,
        "scale": scale,
        "met": found.chosen is not None,
        "searched_rules": [rule.metric for rule in rules],
        "utility_budget": budget,
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


def _harmful_losses(
    model: Any, harmful: Sequence[TokenRow], size: int, stop: Callable[[], bool]
) -> Iterator[Callable[[], Tensor]]:
    """One closure a batch. A last batch of another size would weigh its rows differently, so it is
    left out where there are others."""
    device = next(model.parameters()).device
    whole = len(harmful) - len(harmful) % size or len(harmful)
    for start in range(0, whole, size):
        if stop():
            raise Stopped
        batch = collate(harmful[start : start + size], device)
        yield partial(response_token_mean_nll, model, *batch)


def _identity(parameters: Mapping[str, Tensor]) -> str:
    """Names the adapter's present values."""
    digest = hashlib.sha256()
    for name, tensor in parameters.items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _search_plan(plan: EvaluationPlan) -> EvaluationPlan:
    """Validation prompts only, no look-alikes, no diversity."""
    validation = load_prompts("harmful_prompts").of_split("validation")
    count = plan.options.search_prompts
    chosen = tuple(validation if count is None else subset(validation, count))
    return plan._replace(safety=(("harmful", chosen),), open_ended=())
