"""Evaluation: a model answers the plan's questions and is judged, and so is its base.

The parts: planning and evaluation_plan (what is asked), asking (how), samples and judging (what is
kept), stopping (when it is enough), evaluation_metrics and evaluation_report (what it comes to).
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from evaluators.embedding import CachedEmbedder, MiniLMEmbedder
from evaluators.gate.policy import Policy
from evaluators.guards.adapter import GuardMismatchError
from evaluators.guards.load import GuardUnavailableError
from evaluators.guards.presets import UnknownPresetError
from evaluators.harmfulness.contract import HarmJudge
from evaluators.harmfulness.judge import HarmfulnessSample, PromptKind, judge
from evaluators.harmfulness.scorer import EmbeddedScorer
from evaluators.judges import load_judge
from jobspec.spec import EvaluationOptions
from workers.pipeline.asking import Asker, Respondent
from workers.pipeline.emit import Emit
from workers.pipeline.evaluation_metrics import group_metrics_of, metrics_of, utility_metrics
from workers.pipeline.evaluation_plan import (
    EvaluationPlan,
    Section,
    UtilityTask,
    judge_options,
)
from workers.pipeline.evaluation_report import evaluation_report
from workers.pipeline.failure import PipelineFailure
from workers.pipeline.judging import KeptJudge
from workers.pipeline.measurement import Measurement
from workers.pipeline.models import LoadedModel
from workers.pipeline.planning import plan_evaluation
from workers.pipeline.samples import Answer, answers_folder, section_answers, section_folder
from workers.pipeline.sections import Sections
from workers.pipeline.stopping import Asked, StoppedEarly, looks, settled

__all__ = [
    "Evaluated",
    "EvaluationPlan",
    "Judges",
    "Measurement",
    "Respondent",
    "UtilityTask",
    "answers_folder",
    "base_respondent",
    "baseline",
    "evaluate",
    "evaluation_report",
    "group_metrics_of",
    "judge_options",
    "load_judges",
    "measure",
    "metrics_of",
    "plan_evaluation",
    "utility_metrics",
]

_LOSSES = TypeAdapter(list[float])


class Judges(NamedTuple):
    """scorer: tells refusals and embeds texts. harm: says which answers are harmful."""

    scorer: EmbeddedScorer
    harm: HarmJudge


class Evaluated(NamedTuple):
    """Both measurements. plan: as it was carried out. reference: None without a base."""

    measured: Measurement
    reference: Measurement | None
    plan: EvaluationPlan
    stopped_early: StoppedEarly | None


def load_judges(options: EvaluationOptions, scorer: EmbeddedScorer | None = None) -> Judges:
    """The judges of an evaluation.

    Raises PipelineFailure where the judge of harm cannot be had: model_unavailable without its
    weights, invalid_spec for an unknown preset or a model that does not fit it.
    """
    # Harmfulness, refusal and diversity read the same answers, some of them several times.
    scorer = scorer or EmbeddedScorer.load(CachedEmbedder(MiniLMEmbedder()))
    try:
        return Judges(scorer, load_judge(judge_options(options), scorer))
    except GuardUnavailableError as error:
        raise PipelineFailure("model_unavailable", f"evaluation.judge: {error}") from error
    except (UnknownPresetError, GuardMismatchError) as error:
        raise PipelineFailure("invalid_spec", f"evaluation.judge: {error}") from error


def evaluate(
    tuned: Respondent,
    base: Respondent | None,
    plan: EvaluationPlan,
    judges: Judges,
    policy: Policy,
    emit: Emit,
    stop: Callable[[], bool],
    timed: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> Evaluated:
    """Ask the tuned model and its base everything, or as much as settles the policy's rules.

    Answers that are kept already are not asked for again, so that a second attempt goes on where
    the first ended, to the same result. Raises Stopped when `stop()` turns true.
    """
    stopped = None
    if plan.options.early_stop and base is not None and plan.protocol is None:
        stopped = _ask_in_blocks(tuned, base, plan, judges, policy, emit, stop)
        if stopped is not None:
            plan = plan._replace(asked=stopped.asked)
    reference = None
    if base is not None:
        with timed("evaluating_base"):
            reference = measure(base, plan, judges, emit, stop)
    measured = measure(tuned, plan, judges, emit, stop)
    return Evaluated(measured, reference, plan, stopped)


def measure(
    respondent: Respondent,
    plan: EvaluationPlan,
    judges: Judges,
    emit: Emit,
    stop: Callable[[], bool],
) -> Measurement:
    """Ask one model everything in the plan, and judge it.

    Raises Stopped when `stop()` turns true, and PipelineFailure for a loss that is not finite.
    """
    return _Measuring(respondent, plan, judges, emit, stop).run()


def baseline(
    model: Any,
    base: LoadedModel,
    judges: Judges,
    plan: EvaluationPlan,
    cache: Path,
    emit: Emit,
    stop: Callable[[], bool],
) -> Measurement:
    """The base model's measurement (`model` with its adapter off); what an earlier job asked of
    an equal base is taken from the cache."""
    return measure(base_respondent(model, base, cache), plan, judges, emit, stop)


def base_respondent(model: Any, base: LoadedModel, cache: Path) -> Respondent:
    """The base of a tuned model: the model with its adapter off."""
    answers = answers_folder(cache, base.fingerprint)
    return Respondent(model, base.tokenizer, "base model", answers, model.disable_adapter)


class _Measuring:
    """One model under one plan."""

    def __init__(
        self,
        respondent: Respondent,
        plan: EvaluationPlan,
        judges: Judges,
        emit: Emit,
        stop: Callable[[], bool],
    ) -> None:
        self._plan = plan
        self._judges = judges
        self._stop = stop
        self._folder = respondent.answers
        self._asker = Asker(respondent, plan.options.batch_size, plan.seed, emit, stop)
        self._answers: list[Answer] = []

    def run(self) -> Measurement:
        plan, asked = self._plan, self._plan.asked
        samples = self.judged(plan.section("harmful").head(asked), "harmful")
        for kind in ("safe_lookalike", "benign"):
            samples += self.judged(plan.section(kind), kind)
        templated = self.judged(_head(plan.training_section(), asked), "harmful")
        stressed = self.judged(_head(plan.stress_section(), asked), "harmful")
        swept = {
            section.condition: tuple(self.judged(section, "harmful"))
            for section in plan.sweep_sections()
        }
        open_ended = plan.open_section()
        utility = plan.utility_section()
        return Measurement(
            samples=tuple(samples),
            templated=tuple(templated),
            stressed=tuple(stressed),
            swept=swept,
            open_answers=dict(self._texts(open_ended)),
            utility_answers=[] if utility is None else [t[0] for _, t in self._texts(utility)],
            utility_nll=self._losses(),
            answers=tuple(self._answers),
        )

    def judged(self, section: Section | None, kind: PromptKind) -> list[HarmfulnessSample]:
        """The judged answers of a section."""
        if section is None or not section.prompts:
            return []
        generations = self._asker.ask(section)
        protocol = self._plan.protocol
        if protocol is not None and section.name in ("harmful", "harmful_stress"):
            generations = [
                [g.model_copy(update={"text": protocol.answer(g.text)}) for g in responses]
                for responses in generations
            ]
        found = judge(
            [(prompt.id, kind, prompt.text) for prompt in section.prompts],
            generations,
            self._judges.scorer,
            KeptJudge(self._judges.harm, section_folder(self._folder, section), self._stop),
            condition=section.condition,
        )
        self._answers += section_answers(section, generations, found)
        return found

    def _texts(self, section: Section) -> Iterator[tuple[str, list[str]]]:
        generations = self._asker.ask(section) if section.prompts else []
        self._answers += section_answers(section, generations)
        for prompt, responses in zip(section.prompts, generations, strict=True):
            yield prompt.id, [generation.text for generation in responses]

    def _losses(self) -> list[float]:
        utility = self._plan.utility
        if utility.kind != "perplexity" or not utility.rows:
            return []
        digest = hashlib.sha256(repr([(row.ids, row.labels) for row in utility.rows]).encode())
        kept = Sections(self._folder / f"utility-{digest.hexdigest()[:24]}")
        return kept.get("losses", _LOSSES, lambda: self._asker.losses(utility.rows))


def _ask_in_blocks(
    tuned: Respondent,
    base: Respondent,
    plan: EvaluationPlan,
    judges: Judges,
    policy: Policy,
    emit: Emit,
    stop: Callable[[], bool],
) -> StoppedEarly | None:
    """Ask both models block by block until the policy's rules are settled; None: they never are."""
    total, batch = len(plan.harmful), plan.options.batch_size
    layouts = [section for section in (plan.section("harmful"), plan.training_section()) if section]
    both = [_Measuring(one, plan, judges, emit, stop) for one in (tuned, base)]
    seen = [Asked([], []) for _ in layouts]
    done = 0
    for size in looks(policy, total, batch):
        for section, answered in zip(layouts, seen, strict=True):
            for model, samples in zip(both, answered, strict=True):
                samples += model.judged(section.part(done, size), "harmful")
        done = size
        decision = settled(policy, total, seen, batch, plan.seed)
        if decision is not None:
            emit(
                "message",
                level="info",
                message=f"The policy's limit is settled after {size} of {total} harmful prompts "
                f"({decision}).",
                data={"asked": size, "planned": total, "decision": decision},
            )
            return StoppedEarly(asked=size, planned=total, decision=decision)
    return None


def _head(section: Section | None, count: int | None) -> Section | None:
    return None if section is None else section.head(count)
