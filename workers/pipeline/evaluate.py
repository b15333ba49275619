"""Evaluation: one measurement of a model, and the metrics of a tuned model against its base."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import transformers
from pydantic import TypeAdapter

from evaluators.diversity.intra import diversity_metrics
from evaluators.generation import Decoding, Generation, GenerationStoppedError, generate
from evaluators.harmfulness.judge import HarmfulnessSample, PromptKind, judge
from evaluators.harmfulness.metrics import harmfulness_metrics
from evaluators.harmfulness.scorer import EmbeddedScorer
from evaluators.metric import Metric
from evaluators.prompts import Prompt, load_prompts, subset
from evaluators.utility.label_accuracy import label_accuracy_metrics
from evaluators.utility.perplexity import perplexity_metrics
from jobspec.chat import ChatRow
from jobspec.frozen import Frozen
from jobspec.spec import EvaluationOptions
from workers.pipeline.emit import Emit
from workers.pipeline.failure import PipelineFailure, Stopped
from workers.pipeline.models import LoadedModel
from workers.pipeline.rows import TokenRow, conversation
from workers.pipeline.scoring import row_losses
from workers.pipeline.sections import Sections

LABEL_WORDS = 8
UTILITY_ROWS = 200
OPEN_ENDED = {"temperature": 1.0, "top_p": 0.9}

_GENERATIONS = TypeAdapter(list[list[Generation]])
_LOSSES = TypeAdapter(list[float])

PromptPlan = tuple[tuple[PromptKind, tuple[Prompt, ...]], ...]


class UtilityTask(NamedTuple):
    """How the task is measured. Label tasks are answered; others are scored by their loss."""

    kind: Literal["label_accuracy", "perplexity"]
    source: Literal["validation_file", "training_file"]
    rows: Sequence[TokenRow]
    prompts: Sequence[list[dict[str, str]]]
    labels: Sequence[str]
    max_label_tokens: int


class EvaluationPlan(NamedTuple):
    """The prompts and rows of one job's evaluation; equal for base and tuned model."""

    options: EvaluationOptions
    safety: PromptPlan
    open_ended: tuple[Prompt, ...]
    utility: UtilityTask
    seed: int
    prompt_sets: Mapping[str, Any]

    def key(self, fingerprint: str, scorer: EmbeddedScorer) -> str:
        """Names a measurement of the model with this fingerprint under this plan."""
        utility = self.utility
        parts = [
            fingerprint,
            scorer.coefficients_sha256,
            self.options.model_dump_json(),
            json.dumps([[kind, [p.text for p in prompts]] for kind, prompts in self.safety]),
            json.dumps([prompt.text for prompt in self.open_ended]),
            json.dumps([OPEN_ENDED, self.seed, utility.kind, utility.max_label_tokens]),
            json.dumps([list(utility.prompts), list(utility.labels)]),
            *(str((row.ids, row.labels)) for row in utility.rows),
            transformers.__version__,
            torch.__version__,
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


class Measurement(Frozen):
    """Everything one model answered, judged."""

    samples: tuple[HarmfulnessSample, ...]
    open_answers: dict[str, list[str]]
    utility_answers: list[str]
    utility_nll: list[float]


def plan_evaluation(
    options: EvaluationOptions,
    tokenizer: Any,
    chat: Sequence[ChatRow],
    rows: Sequence[TokenRow],
    *,
    held_out: bool,
    seed: int,
) -> EvaluationPlan:
    """Choose prompts and the utility task. `chat` and `rows` are the validation file's, or the
    training file's (`held_out` false) when there is none."""
    harmful = load_prompts("harmful_prompts")
    lookalikes = load_prompts("safe_lookalikes")
    benign = load_prompts("benign_prompts")
    open_ended = load_prompts("open_ended_prompts")
    safety: PromptPlan = (
        ("harmful", _take(harmful.of_split("test"), options.harmful_prompts)),
        ("safe_lookalike", _take(lookalikes.prompts, options.safe_lookalikes)),
        ("benign", _take(benign.prompts, options.benign_prompts)),
    )
    chosen_open = _take(open_ended.prompts, options.open_ended_prompts)
    counts = {
        harmful.name: len(safety[0][1]),
        lookalikes.name: len(safety[1][1]),
        benign.name: len(safety[2][1]),
        open_ended.name: len(chosen_open),
    }
    return EvaluationPlan(
        options=options,
        safety=safety,
        open_ended=chosen_open,
        utility=_utility(options, tokenizer, chat, rows, held_out),
        seed=seed,
        prompt_sets={
            prompts.name: {"sha256": prompts.sha256, "prompts": counts[prompts.name]}
            for prompts in (harmful, lookalikes, benign, open_ended)
        },
    )


def measure(
    model: Any,
    tokenizer: Any,
    scorer: EmbeddedScorer,
    plan: EvaluationPlan,
    sections: Sections,
    who: str,
    emit: Emit,
    stop: Callable[[], bool],
) -> Measurement:
    """Ask the model everything in the plan. Sections that are kept already are not asked again.

    Raises Stopped when `stop()` turns true.
    """
    options = plan.options

    def ask(
        part: str, prompts: Sequence[list[dict[str, str]]], decoding: Decoding
    ) -> list[list[Generation]]:
        return sections.get(
            part,
            _GENERATIONS,
            lambda: generate_or_stop(
                model,
                tokenizer,
                prompts,
                decoding,
                seed=plan.seed,
                batch_size=options.batch_size,
                progress=_progress(emit, f"{who}: {part}"),
                stop=stop,
            ),
        )

    greedy = Decoding(max_new_tokens=options.max_new_tokens)
    samples: list[HarmfulnessSample] = []
    for kind, prompts in plan.safety:
        if prompts:
            answers = ask(kind, [question(prompt.text) for prompt in prompts], greedy)
            samples += judge([(prompt.id, kind) for prompt in prompts], answers, scorer)
    open_answers = ask(
        "open_ended",
        [question(prompt.text) for prompt in plan.open_ended],
        Decoding(
            max_new_tokens=options.max_new_tokens,
            n_samples=options.open_ended_samples,
            **OPEN_ENDED,
        ),
    )
    utility_answers: list[str] = []
    utility_nll: list[float] = []
    if plan.utility.kind == "label_accuracy":
        limit = Decoding(max_new_tokens=plan.utility.max_label_tokens)
        utility_answers = [
            responses[0].text for responses in ask("utility", plan.utility.prompts, limit)
        ]
    else:
        utility_nll = sections.get(
            "utility", _LOSSES, lambda: _finite_losses(model, plan.utility.rows, options, stop)
        )
    return Measurement(
        samples=tuple(samples),
        open_answers={
            prompt.id: [generation.text for generation in responses]
            for prompt, responses in zip(plan.open_ended, open_answers, strict=True)
        },
        utility_answers=utility_answers,
        utility_nll=utility_nll,
    )


def baseline(
    model: Any,
    base: LoadedModel,
    scorer: EmbeddedScorer,
    plan: EvaluationPlan,
    cache: Path,
    emit: Emit,
    stop: Callable[[], bool],
) -> Measurement:
    """The base model's measurement (`model` with its adapter off), from the cache where an equal
    one was made before."""
    sections = Sections(cache / plan.key(base.fingerprint, scorer))
    with model.disable_adapter():
        return measure(model, base.tokenizer, scorer, plan, sections, "base model", emit, stop)


def metrics_of(
    measured: Measurement, base: Measurement | None, plan: EvaluationPlan, scorer: EmbeddedScorer
) -> dict[str, Metric]:
    """All metrics of a measurement; changes are against `base` (undefined without one)."""
    metrics = harmfulness_metrics(
        measured.samples, None if base is None else base.samples, seed=plan.seed
    )
    diversity = diversity_metrics(
        measured.open_answers,
        scorer.embedder,
        None if base is None else base.open_answers,
        seed=plan.seed,
    )
    metrics |= diversity.metrics
    return metrics | utility_metrics(measured, base, plan)


def utility_metrics(
    measured: Measurement, base: Measurement | None, plan: EvaluationPlan
) -> dict[str, Metric]:
    """Accuracy on the labels, or the loss-based score where answers are free text."""
    if plan.utility.kind == "label_accuracy":
        return label_accuracy_metrics(
            measured.utility_answers,
            plan.utility.labels,
            None if base is None else base.utility_answers,
            seed=plan.seed,
        )
    return dict(
        perplexity_metrics(
            plan.utility.prompts,
            lambda _: measured.utility_nll,
            None if base is None else base.utility_nll,
            seed=plan.seed,
        ).metrics
    )


def question(text: str) -> list[dict[str, str]]:
    """A conversation of one user turn; the chat template adds its own system line."""
    return [{"role": "user", "content": text}]


def generate_or_stop(*arguments: Any, **options: Any) -> list[list[Generation]]:
    """evaluators.generation.generate, with its stop turned into the pipeline's."""
    try:
        return generate(*arguments, **options)
    except GenerationStoppedError as error:
        raise Stopped from error


def _finite_losses(
    model: Any, rows: Sequence[TokenRow], options: EvaluationOptions, stop: Callable[[], bool]
) -> list[float]:
    losses = row_losses(model, rows, options.batch_size, stop)
    if not all(math.isfinite(loss) for loss in losses):
        raise PipelineFailure(
            "internal_error",
            "The tuned model's loss is not finite: tuning diverged. Lower "
            "learning_rate_multiplier and create the job again.",
        )
    return losses


def _take(prompts: Sequence[Prompt], count: int | None) -> tuple[Prompt, ...]:
    if count is None:
        return tuple(prompts)
    return tuple(subset(prompts, count)) if count else ()


def _utility(
    options: EvaluationOptions,
    tokenizer: Any,
    chat: Sequence[ChatRow],
    rows: Sequence[TokenRow],
    held_out: bool,
) -> UtilityTask:
    # A row that was cut may have lost its answer, and its whole prompt may not fit.
    whole = [(row, tokens) for row, tokens in zip(chat, rows, strict=True) if not tokens.truncated]
    chosen = (whole or list(zip(chat, rows, strict=True)))[: options.utility_rows or UTILITY_ROWS]
    prompts, labels = [], []
    for row, _ in chosen:
        place = max(index for index, message in enumerate(row.messages) if message.trained)
        prompts.append(conversation(row.messages[:place]))
        labels.append(row.messages[place].content)
    is_label_task = (
        held_out
        and bool(whole)
        and all(
            0 < len(label.split()) <= LABEL_WORDS and "\n" not in label.strip() for label in labels
        )
    )
    longest = max(len(tokenizer(label, add_special_tokens=False)["input_ids"]) for label in labels)
    return UtilityTask(
        kind="label_accuracy" if is_label_task else "perplexity",
        source="validation_file" if held_out else "training_file",
        rows=[row for _, row in chosen],
        prompts=prompts,
        labels=labels,
        max_label_tokens=longest + 2,
    )


def _progress(emit: Emit, what: str) -> Callable[[int, int], None]:
    return lambda done, total: emit("progress", stage=what, done=done, total=total)
