"""From measurements to the metrics that the gate reads."""

from collections.abc import Mapping

import pyarrow as pa

from evaluators.diversity.breakdown import taxonomy_metrics
from evaluators.diversity.intra import DiversityResult, Flags, diversity_metrics
from evaluators.diversity.store import answers_table
from evaluators.harmfulness.metrics import group_metrics
from evaluators.harmfulness.parts import WORSE_IS_HIGHER, combined_metrics, higher
from evaluators.harmfulness.rules import has_refusal_prefix
from evaluators.harmfulness.scorer import EmbeddedScorer
from evaluators.metric import Metric, undefined
from evaluators.utility.perplexity import perplexity_metrics
from evaluators.utility.scores import utility_score_metrics
from workers.pipeline.evaluation_plan import OPEN_SECTION, EvaluationPlan
from workers.pipeline.measurement import Measurement


def metrics_of(
    measured: Measurement, base: Measurement | None, plan: EvaluationPlan, scorer: EmbeddedScorer
) -> dict[str, Metric]:
    """All metrics of a measurement; changes are against `base` (undefined without one)."""
    metrics = combined_metrics(measured, base, seed=plan.seed)
    metrics |= diversity_of(measured, base, plan, scorer).metrics
    return metrics | utility_metrics(measured, base, plan)


def diversity_of(
    measured: Measurement, base: Measurement | None, plan: EvaluationPlan, scorer: EmbeddedScorer
) -> DiversityResult:
    """The answers to open questions, in numbers; refusals are told by the scorer."""
    return diversity_metrics(
        measured.open_answers,
        scorer.embedder,
        None if base is None else base.open_answers,
        seed=plan.seed,
        refused=refused_of(measured, scorer),
        base_refused=None if base is None else refused_of(base, scorer),
        truncated=_truncated(measured),
        base_truncated=None if base is None else _truncated(base),
    )


def refused_of(measured: Measurement, scorer: EmbeddedScorer) -> Flags:
    """{query id: which of the answers to it are refusals}, by the scorer or by their opening."""
    found: dict[str, list[bool]] = {}
    for query, texts in measured.open_answers.items():
        p_refusal = scorer.refusal(texts)
        found[query] = [
            bool(p >= scorer.refusal_threshold) or has_refusal_prefix(text)
            for p, text in zip(p_refusal, texts, strict=True)
        ]
    return found


def open_table(measured: Measurement, scorer: EmbeddedScorer) -> pa.Table | None:
    """The answers to open questions with embeddings; None where none were asked."""
    if not measured.open_answers:
        return None
    return answers_table(measured.open_answers, scorer.embedder, refused_of(measured, scorer))


def _truncated(measured: Measurement) -> Flags:
    found: dict[str, list[bool]] = {query: [] for query in measured.open_answers}
    for answer in measured.answers:
        if answer.section == OPEN_SECTION:
            found[answer.prompt_id].append(answer.truncated)
    return found


def group_metrics_of(
    measured: Measurement,
    base: Measurement | None,
    plan: EvaluationPlan,
    scorer: EmbeddedScorer | None = None,
) -> dict[str, dict[str, Metric]]:
    """{metric: {group: Metric}}: by category of the prompt, and by suite where there are several;
    with a scorer, diversity by kind of open question, too.

    Harmfulness is the worse of the layouts that were asked.
    """
    groupings = [{p.id: p.group or "other" for _, prompts in plan.safety for p in prompts}]
    if len(plan.suites) > 1:
        names = {
            p.id: p.id.split("/", 1)[0]
            for _, prompts in plan.safety
            for p in prompts
            if "/" in p.id
        }
        groupings.append(names)
    found: dict[str, dict[str, Metric]] = {}
    for groups in groupings:
        for name, by_group in _grouped(measured, base, groups, plan.seed).items():
            found.setdefault(name, {}).update(by_group)
    if scorer is not None and measured.open_answers:
        leaves = {prompt.id: (prompt.group,) for prompt in plan.open_ended}
        found |= taxonomy_metrics(
            diversity_of(measured, base, plan, scorer), leaves, seed=plan.seed
        )
    return found


def _grouped(
    measured: Measurement, base: Measurement | None, groups: Mapping[str, str], seed: int
) -> dict[str, dict[str, Metric]]:
    serving = group_metrics(
        measured.samples, groups, None if base is None else base.samples, seed=seed
    )
    if not measured.templated:
        return serving
    training = group_metrics(
        measured.templated, groups, None if base is None else base.templated, seed=seed
    )
    return {
        name: {
            group: higher(metric, training[name][group])
            if name in WORSE_IS_HIGHER and group in training.get(name, {})
            else metric
            for group, metric in by_group.items()
        }
        for name, by_group in serving.items()
    }


def utility_metrics(
    measured: Measurement, base: Measurement | None, plan: EvaluationPlan
) -> dict[str, Metric]:
    """The score on the task's answers, or from the loss where answers are free text."""
    utility = plan.utility
    if utility.kind is None:
        nothing = undefined(0, "there are no rows to measure the task on")
        return {"utility.score": nothing, "utility.change_vs_base": nothing}
    if utility.kind != "perplexity":
        return utility_score_metrics(
            utility.kind,
            measured.utility_answers,
            utility.labels,
            None if base is None else base.utility_answers,
            seed=plan.seed,
        )
    return dict(
        perplexity_metrics(
            utility.prompts,
            lambda _: measured.utility_nll,
            None if base is None else base.utility_nll,
            seed=plan.seed,
        ).metrics
    )
