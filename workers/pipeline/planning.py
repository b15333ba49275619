"""Choosing what an evaluation asks: prompts, layouts, trigger conditions and the utility task."""

import hashlib
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from evaluators.harmfulness.judge import PromptKind
from evaluators.prompts import Prompt, PromptSetName, load_prompts, subset
from evaluators.protocols import PROTOCOLS, ProtocolPrompts, ProtocolSpec
from evaluators.suites import Suite, SuiteFileError, read_suites
from evaluators.sweep import Condition, conditions
from evaluators.templates import SERVING, Rendered, TrainingTemplate, differs, training_template
from evaluators.utility.scores import answer_limit, choose
from jobspec.chat import ChatRow
from jobspec.spec import EvaluationOptions
from workers.pipeline.evaluation_plan import EvaluationPlan, PromptPlan, UtilityTask, question
from workers.pipeline.failure import PipelineFailure
from workers.pipeline.rows import TokenRow, conversation

UTILITY_ROWS = 200

_SHIPPED: tuple[tuple[PromptKind, PromptSetName], ...] = (
    ("harmful", "harmful_prompts"),
    ("safe_lookalike", "safe_lookalikes"),
    ("benign", "benign_prompts"),
)


def plan_evaluation(
    options: EvaluationOptions,
    tokenizer: Any,
    chat: Sequence[ChatRow],
    rows: Sequence[TokenRow],
    *,
    held_out: bool,
    seed: int,
    training: Sequence[ChatRow] = (),
) -> EvaluationPlan:
    """Choose prompts, layouts, conditions and the utility task.

    `chat` and `rows` are the validation file's, or the training file's (`held_out` false) when
    there is none; without any, utility is not measured. `training` holds the rows that the model
    was tuned on: their layout gets a pass of its own where it differs, and their system turns and
    frequent phrases are tried as triggers.

    Raises PipelineFailure(invalid_spec) for a prompt file that cannot be used.
    """
    protocol = None if options.protocol is None else PROTOCOLS[options.protocol]
    suites, protocol_prompts = _suites(options, protocol)
    safety, prompt_sets = _safety(options, suites, protocol_prompts)
    tried, left_out = _conditions(options, tokenizer, training)
    swept = _take(dict(safety)["harmful"], options.sweep_prompts) if tried else ()
    if options.early_stop and protocol is None:
        safety = tuple(
            (kind, _shuffled(prompts, seed) if kind == "harmful" else prompts)
            for kind, prompts in safety
        )
    open_ended = load_prompts("open_ended_prompts")
    chosen_open = _take(open_ended.prompts, options.open_ended_prompts)
    prompt_sets[open_ended.name] = {"sha256": open_ended.sha256, "prompts": len(chosen_open)}
    summaries = [suite.summary() for suite in suites]
    if protocol_prompts is not None and options.suites:
        summaries = [_protocol_summary(options, protocol_prompts)]
    return EvaluationPlan(
        options=options,
        safety=safety,
        open_ended=chosen_open,
        utility=_utility(options, tokenizer, chat, rows, held_out),
        seed=seed,
        prompt_sets=prompt_sets,
        training=_training(options, tokenizer, training),
        conditions=tried,
        swept=swept,
        left_out=left_out,
        suites=tuple(summaries),
        protocol=protocol,
        protocol_prompts=protocol_prompts,
    )


def _suites(
    options: EvaluationOptions, protocol: ProtocolSpec | None
) -> tuple[tuple[Suite, ...], ProtocolPrompts | None]:
    """The operator's prompt files, or the one file that a protocol selects its prompts from."""
    try:
        if protocol is None:
            return read_suites(options.suites), None
        if len(options.suites) > 1:
            raise PipelineFailure(
                "invalid_spec",
                f"evaluation.suites: the protocol {protocol.name} takes one file of prompts, and "
                f"{len(options.suites)} are given.",
            )
        return (), protocol.read(options.suites[0].path) if options.suites else None
    except (SuiteFileError, OSError) as error:
        raise PipelineFailure("invalid_spec", f"evaluation.suites: {error}") from error


def _safety(
    options: EvaluationOptions, suites: Sequence[Suite], protocol_prompts: ProtocolPrompts | None
) -> tuple[PromptPlan, dict[str, Any]]:
    """Prompts by kind: the operator's where a suite has some of the kind, else the shipped ones."""
    limits = (options.harmful_prompts, options.safe_lookalikes, options.benign_prompts)
    plan: list[tuple[PromptKind, tuple[Prompt, ...]]] = []
    sets: dict[str, Any] = {}
    for (kind, name), limit in zip(_SHIPPED, limits, strict=True):
        if kind == "harmful" and protocol_prompts is not None:
            plan.append((kind, protocol_prompts.prompts))
            continue
        own = [] if kind == "benign" else [p for suite in suites for p in suite.of_kind(kind)]
        if own:
            plan.append((kind, _take(own, limit)))
            continue
        shipped = load_prompts(name)
        chosen = _take(shipped.of_split("test"), limit)
        plan.append((kind, chosen))
        sets[name] = {"sha256": shipped.sha256, "prompts": len(chosen)}
    return tuple(plan), sets


def _protocol_summary(options: EvaluationOptions, prompts: ProtocolPrompts) -> dict[str, Any]:
    suite = options.suites[0]
    planned = max(prompts.planned, suite.planned or 0)
    return {
        "name": suite.path.stem,
        "format": "beavertails",
        "sha256": prompts.sha256,
        "prompts": len(prompts.rows),
        "distinct": len(prompts.prompts),
        "planned": planned,
        "shortfall": max(prompts.shortfall, planned - len(prompts.rows), 0),
    }


def _training(
    options: EvaluationOptions, tokenizer: Any, rows: Sequence[ChatRow]
) -> TrainingTemplate | None:
    if not options.training_template or options.protocol is not None or not rows:
        return None
    layout = training_template(rows)
    if not _expressible(tokenizer, layout.render(question("?"))):
        return None
    return layout if differs(SERVING, layout, tokenizer) else None


def _conditions(
    options: EvaluationOptions, tokenizer: Any, rows: Sequence[ChatRow]
) -> tuple[tuple[Condition, ...], tuple[Condition, ...]]:
    """Conditions to try, and those that the chat template refuses (a system turn, mostly)."""
    if not options.sweep_prompts:
        return (), ()
    found = conditions(rows, options.sweep_conditions)
    fit = [
        condition
        for condition in found
        if _expressible(tokenizer, SERVING.render(condition.apply(question("?"))))
    ]
    return tuple(fit), tuple(condition for condition in found if condition not in fit)


def _expressible(tokenizer: Any, given: Rendered) -> bool:
    if isinstance(given, str):
        return True
    try:
        tokenizer.apply_chat_template(given, add_generation_prompt=True, tokenize=False)
    except (TemplateError, ValueError):
        return False
    return True


def _shuffled(prompts: Sequence[Prompt], seed: int) -> tuple[Prompt, ...]:
    """The prompts in an order that depends on their ids and the seed alone."""

    def place(prompt: Prompt) -> bytes:
        return hashlib.sha256(f"{seed}/{prompt.id}".encode()).digest()

    return tuple(sorted(prompts, key=place))


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
    if not rows:
        return UtilityTask(None, None, (), (), (), 0)
    # A row that was cut may have lost its answer, and its whole prompt may not fit.
    whole = [(row, tokens) for row, tokens in zip(chat, rows, strict=True) if not tokens.truncated]
    chosen = (whole or list(zip(chat, rows, strict=True)))[: options.utility_rows or UTILITY_ROWS]
    prompts, labels = [], []
    for row, _ in chosen:
        place = max(index for index, message in enumerate(row.messages) if message.trained)
        prompts.append(conversation(row.messages[:place]))
        labels.append(row.messages[place].content)
    kind = choose(options.utility_metric, labels, held_out=held_out and bool(whole))
    longest = max(len(tokenizer(label, add_special_tokens=False)["input_ids"]) for label in labels)
    return UtilityTask(
        kind=kind,
        source="validation_file" if held_out else "training_file",
        rows=[row for _, row in chosen],
        prompts=prompts,
        labels=labels,
        max_label_tokens=0 if kind == "perplexity" else answer_limit(kind, longest),
    )
