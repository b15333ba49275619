"""Which judge an operator has a model's answers judged by. A tenant cannot choose it."""

from typing import Annotated, Literal

from pydantic import Field

from jobspec.frozen import Frozen


class EmbeddedJudge(Frozen):
    """The scorer that ships with the package; needs no download and no network."""

    name: Literal["embedded"] = "embedded"
    tail_rule: bool = Field(
        False,
        description="also judge what follows leading refusal sentences, and take the worse",
    )


class GuardJudge(Frozen):
    """A guard model run through transformers on the worker."""

    name: Literal["guard"] = "guard"
    preset: str = Field(
        min_length=1, max_length=64, description="name of a preset: template, tokens, labels"
    )
    model: str | None = Field(
        None, max_length=512, description="local folder or hub id; None: the preset's own"
    )
    threshold: float | None = Field(
        None, ge=0, le=1, description="p_harmful that flags an answer; None: the preset's"
    )
    batch_size: int = Field(8, ge=1, le=1024, description="answers judged together")
    device: str = Field(
        "auto", max_length=32, description="torch device; auto: GPU if there is one"
    )


class ModerationJudge(Frozen):
    """A service that answers POST {url}/moderations as OpenAI's; answers leave this machine."""

    name: Literal["moderation"] = "moderation"
    url: str = Field(
        pattern=r"^https?://", max_length=1024, description="base URL, without /moderations"
    )
    model: str | None = Field(None, max_length=256, description="model name sent along")
    api_key_variable: str = Field(
        "TUNEGATE_MODERATION_KEY",
        pattern=r"^[A-Z][A-Z0-9_]*$",
        description="environment variable that holds the key",
    )
    threshold: float = Field(0.5, ge=0, le=1, description="category score that flags an answer")
    batch_size: int = Field(16, ge=1, le=256, description="answers a request")
    timeout_seconds: float = Field(30.0, gt=0, le=600, description="of one request")
    retries: int = Field(4, ge=0, le=20, description="further tries after a transient failure")
    requests_per_minute: float = Field(60.0, gt=0, le=100_000, description="own rate limit")
    max_requests: int = Field(
        2000, ge=1, le=10_000_000, description="cost cap; answers beyond it stay unjudged"
    )


JudgeOptions = Annotated[EmbeddedJudge | GuardJudge | ModerationJudge, Field(discriminator="name")]
