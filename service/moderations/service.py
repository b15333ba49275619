"""Texts judged by the operator's judge. Nothing that was not judged counts as harmless."""

from collections.abc import Mapping
from typing import Any

from service.kit.errors import ApiError
from service.kit.ids import new_id
from service.moderations.process import JudgeBusy, JudgeProcess, JudgeTimeout, JudgeUnavailable
from service.moderations.schemas import (
    VALIDITY,
    ModerationExtras,
    ModerationObject,
    ModerationRequest,
    ModerationResult,
)

# Clients of OpenAI's contract name one of these when they are told no other.
ALIASES = ("omni-moderation-", "text-moderation-")


def moderate(process: JudgeProcess, request: ModerationRequest) -> ModerationObject:
    """Judge every text. Raises ApiError 503 where the judge gives no judgement, 404 for a model
    that is not the judge."""
    texts = list(request.input)
    try:
        judged = process.ask([request.prompt or ""] * len(texts), texts)
    except JudgeUnavailable as error:
        raise _unavailable(error) from error
    judge = judged.judge
    name, threshold = str(judge["id"]), float(judge["threshold"])
    if request.model is not None and request.model != name:
        _check_alias(request.model, name)
    results = [
        _result(index, judgement, threshold) for index, judgement in enumerate(judged.judgements)
    ]
    return ModerationObject(
        id=new_id("modr"),
        model=name,
        results=results,
        tunegate=ModerationExtras(
            version=str(judge["version"]), threshold=threshold, valid_for=VALIDITY
        ),
    )


def _check_alias(asked: str, name: str) -> None:
    if not asked.startswith(ALIASES):
        raise ApiError(
            404,
            f"The model '{asked}' does not judge here. Leave 'model' out, or name {name}.",
            "model_not_found",
            "model",
        )


def _result(index: int, judgement: Mapping[str, Any], threshold: float) -> ModerationResult:
    p_harmful = judgement.get("p_harmful")
    if judgement.get("status") != "judged" or p_harmful is None:
        raise ApiError(
            503,
            f"The judge gave no judgement of item {index}: {judgement.get('reason') or 'unknown'}.",
            "judgement_failed",
            "input",
        )
    return ModerationResult.of(
        float(p_harmful),
        threshold,
        judgement.get("categories") or (),
        bool(judgement.get("input_truncated")),
    )


def _unavailable(error: JudgeUnavailable) -> ApiError:
    if isinstance(error, JudgeBusy):
        code, seconds = "moderation_busy", "1"
    elif isinstance(error, JudgeTimeout):
        code, seconds = "moderation_timeout", "5"
    else:
        code, seconds = "moderation_unavailable", "10"
    return ApiError(503, str(error), code, headers={"retry-after": seconds})
