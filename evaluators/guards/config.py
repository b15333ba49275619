"""What a guard model is asked, and how its answer becomes a probability."""

import hashlib
import json
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from jobspec.frozen import Frozen

Family = Literal["sequence_classifier", "one_token", "text"]


class Turn(Frozen):
    """One message of a chat; `content` is a Jinja template."""

    role: str = Field(min_length=1, max_length=64, description="as the chat template names it")
    content: str = Field(max_length=20_000, description="Jinja over the variables of a template")


class Guideline(Frozen):
    """One principle that a model checks in a call of its own."""

    name: str = Field(min_length=1, max_length=100, description="reported as a category")
    text: str = Field(min_length=1, max_length=4000, description="{{ guideline }} of the template")


class Grade(Frozen):
    """One verdict token and the harm that it stands for."""

    token: str = Field(min_length=1, max_length=32, description="as written, without a space")
    value: float = Field(ge=0, le=1, description="harm of an answer with this grade")


class GuardConfig(Frozen):
    """How one guard model is used.

    The input is either `template` (Jinja over prompt, response, guideline, bos, eos, truncated) or
    `messages` in the tokenizer's own chat template. Three families read the output:

    sequence_classifier  logits z_K of the labels; aggregation max: p = max sigmoid(z_k) over the
                         harmful labels, softmax: p = sum of softmax(z)_k over them
    one_token            next-token probabilities after the input, summed over the spellings of
                         each grade: p = sum_g value_g m_g / sum_g m_g. With the grades 1 for the
                         positive and 0 for the negative tokens this is
                         sigmoid(ln m_positive - ln m_negative). Nothing is generated.
    text                 greedy text, read by `parser`

    A fourth family, any function, needs no configuration: see `evaluators.guards.function`.
    """

    model_id: str | None = Field(
        None, max_length=512, description="hub id of the weights; None: the operator names a model"
    )
    family: Family
    image_text: bool = Field(
        False, description="the class is an image-text model with a processor; text alone is given"
    )
    template: str | None = Field(None, max_length=20_000, description="Jinja; None: `messages`")
    messages: tuple[Turn, ...] = Field((), max_length=8, description="turns of the chat template")
    content_parts: bool = Field(
        False, description="turns carry a list of typed parts instead of a text"
    )
    template_arguments: dict[str, Any] = Field(
        default_factory=dict, description="further arguments of the chat template"
    )
    add_generation_prompt: bool = Field(True, description="argument of the chat template")
    bos: bool = Field(True, description="with `template`: begin with the tokenizer's BOS token")
    verdict_prefix: str = Field(
        "", max_length=64, description="what the model always writes before its verdict"
    )
    markers: tuple[str, ...] = Field(
        (),
        max_length=32,
        description="strings that structure the input beside special tokens; broken up where a "
        "prompt or an answer contains them, so that neither can close its own frame",
    )
    guidelines: tuple[Guideline, ...] = Field(
        (), max_length=32, description="one call for each, and the worst counts"
    )
    labels: tuple[str, ...] = Field((), max_length=1000, description="in the order of the logits")
    harmful_labels: tuple[str, ...] | None = Field(
        None, description="labels that mean harm; None: all"
    )
    aggregation: Literal["max", "softmax"] = Field("max", description="see the family")
    positive: tuple[str, ...] = Field((), max_length=32, description="verdict tokens of harm")
    negative: tuple[str, ...] = Field((), max_length=32, description="verdict tokens of no harm")
    grades: tuple[Grade, ...] = Field(
        (), max_length=32, description="in place of positive and negative"
    )
    minimum_mass: float = Field(
        0.1,
        ge=0,
        le=1,
        description="probability that the verdict tokens must hold together; with less the model "
        "was about to say something else, and the judgement is unparsable",
    )
    parser: Literal["wildguard", "strongreject_rubric", "granite_score"] | None = Field(
        None, description="who reads the text of the family text"
    )
    max_new_tokens: int = Field(32, ge=1, le=8192, description="length of that text, tokens")
    threshold: float = Field(0.5, ge=0, le=1, description="p_harmful that flags an answer")
    max_length: int = Field(ge=16, le=1 << 20, description="longest input, tokens")
    max_response_tokens: int | None = Field(
        None, ge=1, le=1 << 20, description="most tokens of the answer; None: max_length decides"
    )
    truncate_part: Literal["response"] = Field(
        "response", description="only the answer is ever cut, at its end"
    )
    padding: Literal["left", "right"] = Field(
        "left", description="side on which shorter inputs of a batch are filled"
    )
    needs_prompt: bool = Field(
        True, description="the input holds the prompt, not the answer alone; for the report"
    )
    text_config_defaults: dict[str, Any] = Field(
        default_factory=dict,
        description="attributes of the text configuration, set where the checkpoint leaves None",
    )

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if (self.template is None) == (not self.messages):
            raise ValueError("a guard needs either template or messages")
        if self.family == "sequence_classifier" and not self.labels:
            raise ValueError("a sequence classifier needs labels")
        if self.family == "one_token":
            if bool(self.grades) == bool(self.positive or self.negative):
                raise ValueError("a one-token guard needs either grades or positive and negative")
            if not self.grades and not (self.positive and self.negative):
                raise ValueError("a one-token guard needs positive and negative tokens")
        if self.family == "text" and self.parser is None:
            raise ValueError("a guard that writes text needs a parser")
        unknown = set(self.harmful_labels or ()) - set(self.labels)
        if unknown:
            raise ValueError(f"harmful labels that are no labels: {sorted(unknown)}")
        return self

    @property
    def verdict_grades(self) -> tuple[Grade, ...]:
        """Grades of the family one_token, whichever way they were given."""
        return self.grades or (
            *(Grade(token=token, value=1) for token in self.positive),
            *(Grade(token=token, value=0) for token in self.negative),
        )

    @property
    def template_sha256(self) -> str:
        """Hash of all that shapes the input and the reading of the output, threshold excepted."""
        content = self.model_dump(mode="json", exclude={"model_id", "threshold"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
