"""What an evaluation asks: prompts, layouts, trigger conditions and the utility task of one job.

Everything here is chosen before a model answers, and is equal for the tuned model and its base.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from evaluators.diversity.decoding import Setting, open_ended_decoding
from evaluators.generation import Decoding
from evaluators.harmfulness.judge import PromptKind
from evaluators.prompts import Prompt
from evaluators.protocols import PROTOCOLS, ProtocolPrompts, ProtocolSpec
from evaluators.sweep import Condition
from evaluators.templates import SERVING, Rendered, TrainingTemplate
from evaluators.utility.scores import ChosenMetric
from jobspec.judging import EmbeddedJudge, JudgeOptions
from jobspec.spec import EvaluationOptions
from workers.pipeline.rows import TokenRow

OPEN_SECTION = "open_ended"
# Of the paper's two settings the one that it compares models with.
OPEN_SETTING: Setting = "A"
STRESS_TEMPERATURE = 1.0

PromptPlan = tuple[tuple[PromptKind, tuple[Prompt, ...]], ...]


class UtilityTask(NamedTuple):
    """How the task is measured: by answers to rows, or by the loss of their answers.

    kind None: there are no rows, and nothing of it is measured.
    """

    kind: ChosenMetric | None
    source: Literal["validation_file", "training_file"] | None
    rows: Sequence[TokenRow]
    prompts: Sequence[list[dict[str, str]]]
    labels: Sequence[str]
    max_label_tokens: int


class Section(NamedTuple):
    """Prompts that are asked alike. inputs: what `generate` takes. key: names the questions and
    the decoding, so that equal sections share their kept answers."""

    name: str
    prompts: tuple[Prompt, ...]
    inputs: tuple[Rendered, ...]
    decoding: Decoding
    key: str
    condition: str = ""

    def head(self, count: int | None) -> "Section":
        """The first `count` prompts of the section, under its key."""
        return self._replace(prompts=self.prompts[:count], inputs=self.inputs[:count])

    def part(self, start: int, end: int) -> "Section":
        """Prompts start to end (exclusive); of a greedy section, whose answers know no place."""
        return self._replace(prompts=self.prompts[start:end], inputs=self.inputs[start:end])


class EvaluationPlan(NamedTuple):
    """The prompts and rows of one job's evaluation; equal for base and tuned model.

    training: the layout of the training rows where it needs a pass of its own. swept: the harmful
    prompts that are asked under every condition. left_out: conditions that the model's chat
    template cannot express. asked: how many harmful prompts were enough (None: all are asked).
    protocol_prompts: None where the shipped prompts stand in for the protocol's own.
    """

    options: EvaluationOptions
    safety: PromptPlan
    open_ended: tuple[Prompt, ...]
    utility: UtilityTask
    seed: int
    prompt_sets: Mapping[str, Any]
    training: TrainingTemplate | None = None
    conditions: tuple[Condition, ...] = ()
    swept: tuple[Prompt, ...] = ()
    left_out: tuple[Condition, ...] = ()
    suites: tuple[Mapping[str, Any], ...] = ()
    protocol: ProtocolSpec | None = None
    protocol_prompts: ProtocolPrompts | None = None
    asked: int | None = None

    @property
    def harmful(self) -> tuple[Prompt, ...]:
        """The harmful prompts that are planned, in the order in which they are asked."""
        return dict(self.safety).get("harmful", ())

    def section(self, kind: PromptKind) -> Section:
        """The prompts of one kind as the model is served, or as the protocol asks them."""
        prompts = dict(self.safety).get(kind, ())
        if kind == "harmful" and self.protocol is not None:
            inputs: list[Rendered] = [self.protocol.render(prompt.text) for prompt in prompts]
            return self._section("harmful", prompts, inputs, self.protocol.decoding)
        return self._section(kind, prompts, _plain(prompts), self._greedy)

    def training_section(self) -> Section | None:
        """The harmful prompts under the training rows' layout, where it is another."""
        if self.training is None:
            return None
        inputs = [self.training.render(question(prompt.text)) for prompt in self.harmful]
        return self._section("harmful_training_template", self.harmful, inputs, self._greedy)

    def stress_section(self) -> Section | None:
        """The harmful prompts, sampled several times."""
        samples = self.options.stress_samples
        if not samples:
            return None
        decoding = self.section("harmful").decoding.model_copy(
            update={"temperature": STRESS_TEMPERATURE, "top_p": 1.0, "n_samples": samples}
        )
        inputs = self.section("harmful").inputs
        return self._section("harmful_stress", self.harmful, inputs, decoding)

    def sweep_sections(self) -> tuple[Section, ...]:
        """The swept prompts under each condition; nothing where there is no prompt."""
        if not self.swept:
            return ()
        return tuple(
            self._section(
                "sweep",
                self.swept,
                [SERVING.render(condition.apply(question(prompt.text))) for prompt in self.swept],
                self._greedy,
                condition.id,
            )
            for condition in self.conditions
        )

    def open_section(self) -> Section:
        decoding = open_ended_decoding(
            OPEN_SETTING,
            n_samples=self.options.open_ended_samples,
            max_new_tokens=self.options.max_new_tokens,
        )
        return self._section(OPEN_SECTION, self.open_ended, _plain(self.open_ended), decoding)

    def utility_section(self) -> Section | None:
        """The rows that are answered, by their place; None where the task is scored by a loss."""
        if self.utility.kind in (None, "perplexity"):
            return None
        prompts = tuple(
            Prompt(id=f"row-{place}", text=f"row {place}")
            for place in range(len(self.utility.prompts))
        )
        decoding = Decoding(max_new_tokens=self.utility.max_label_tokens)
        return self._section("utility", prompts, self.utility.prompts, decoding)

    @property
    def _greedy(self) -> Decoding:
        return Decoding(max_new_tokens=self.options.max_new_tokens)

    def _section(
        self,
        name: str,
        prompts: Sequence[Prompt],
        inputs: Sequence[Rendered],
        decoding: Decoding,
        condition: str = "",
    ) -> Section:
        asked = [[prompt.id, given] for prompt, given in zip(prompts, inputs, strict=True)]
        # A sampled answer depends on the prompt's place and the seed, a greedy one on neither.
        if decoding.temperature == 0.0:
            asked.sort(key=lambda pair: str(pair[0]))
            drawn: list[Any] = [decoding.max_new_tokens]
        else:
            drawn = [decoding.model_dump(exclude={"n_samples"}), self.seed]
        digest = hashlib.sha256(json.dumps([asked, drawn]).encode()).hexdigest()
        return Section(name, tuple(prompts), tuple(inputs), decoding, digest[:24], condition)


def judge_options(options: EvaluationOptions) -> JudgeOptions:
    """The judge that the options name; a protocol's own where they leave it at the default."""
    if options.protocol is not None and options.judge == EmbeddedJudge():
        return PROTOCOLS[options.protocol].judge
    return options.judge


def question(text: str) -> list[dict[str, str]]:
    """A conversation of one user turn; the chat template adds its own system line."""
    return [{"role": "user", "content": text}]


def _plain(prompts: Sequence[Prompt]) -> list[Rendered]:
    return [SERVING.render(question(prompt.text)) for prompt in prompts]
