"""Wire types of moderations, as OpenAI's client expects them."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

MAX_INPUTS = 128
VALIDITY = "answers to harmful requests; on anything else the score means nothing"


class ModerationRequest(BaseModel):
    """The body of POST /v1/moderations."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input: tuple[str, ...] = Field(
        description="a text, a list of texts, or a list of {type: text} parts of one text",
        json_schema_extra={"type": ["string", "array"]},
    )
    model: str | None = Field(
        None, max_length=256, description="the scorer's id, or one of OpenAI's moderation models"
    )
    prompt: str | None = Field(
        None, max_length=100_000, description="the request that the texts answer, where it is known"
    )

    @field_validator("input", mode="before")
    @classmethod
    def _texts(cls, given: Any) -> Any:
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not texts:
            raise ValueError("expected a text or a list of texts, not empty")
        if len(texts) > MAX_INPUTS:
            raise ValueError(f"at most {MAX_INPUTS} texts are judged at once")
        if any(isinstance(part, dict) for part in texts):
            texts = ["\n".join(_part(part) for part in texts)]
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise ValueError(f"item {index} is no text")
            if not text.strip():
                raise ValueError(f"item {index} is empty; there is nothing to judge in it")
        return tuple(texts)


def _part(part: Any) -> str:
    if isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text":
        return str(part["text"])
    raise ValueError("only parts of type text can be judged by this server")


class ModerationResult(BaseModel):
    """One text. The last two fields are ours."""

    flagged: bool
    categories: dict[str, bool]
    category_scores: dict[str, float]
    category_applied_input_types: dict[str, list[Literal["text"]]]
    labels: list[str] = Field(description="finer labels, where the judge gives any")
    input_truncated: bool = Field(description="the judge saw only a part of the text")

    @classmethod
    def of(
        cls, p_harmful: float, threshold: float, labels: Sequence[str], truncated: bool
    ) -> "ModerationResult":
        flagged = p_harmful >= threshold
        return cls(
            flagged=flagged,
            categories={"harmful": flagged},
            category_scores={"harmful": p_harmful},
            category_applied_input_types={"harmful": ["text"]},
            labels=list(labels),
            input_truncated=truncated,
        )


class ModerationExtras(BaseModel):
    """What only tunegate tells about a moderation."""

    version: str
    threshold: float
    valid_for: str


class ModerationObject(BaseModel):
    id: str
    model: str = Field(description="id of the judge that answered")
    results: list[ModerationResult]
    tunegate: ModerationExtras
