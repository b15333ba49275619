"""Reading JSON bodies, and telling the client in OpenAI's terms what is wrong with one."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import orjson
from fastapi import Request
from pydantic import BaseModel, ValidationError

from service.kit.errors import ApiError

MAX_JSON_BYTES = 1024 * 1024
MAX_DEPTH = 32

Model = TypeVar("Model", bound=BaseModel)

_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "string_too_long": "string_above_max_length",
}


async def read_body(request: Request, limit: int = MAX_JSON_BYTES) -> bytes:
    """The whole body. Raises ApiError 413 as soon as it exceeds `limit` bytes."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise ApiError(
                413,
                f"The request body is larger than {limit:,} bytes.",
                "request_too_large",
                headers={"connection": "close"},
            )
    return bytes(body)


def parse_body(model: type[Model], body: bytes) -> Model:
    """`body` as `model`. Raises ApiError 400 that names the first wrong field."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(
            400,
            f"The request body is not valid JSON (line {error.lineno}, column {error.colno}).",
            "invalid_value",
        ) from error
    if not isinstance(value, dict):
        raise ApiError(400, "The request body must be a JSON object.", "invalid_value")
    _check_values(value, "", 1)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False, include_input=False)) from error


def validation_error(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """The 400 for pydantic's list of problems. One is told: an unknown field before all others,
    else the deepest of the first wrong field, since a union reports each member's complaint."""
    first = [problem for problem in problems if problem["loc"][:2] == problems[0]["loc"][:2]]
    unknown = (problem for problem in problems if problem["type"] == "extra_forbidden")
    problem = next(unknown, max(first, key=lambda one: len(_param(one["loc"]))))
    param = _param(problem["loc"])
    code = _CODES.get(problem["type"], "invalid_value")
    if code == "missing_required_parameter":
        message = f"Missing required parameter: '{param}'."
    elif code == "unknown_parameter":
        message = f"Unknown parameter: '{param}'. Remove it."
    else:
        reason = problem["msg"].removeprefix("Value error, ").rstrip(".")
        message = f"Invalid value for '{param}': {reason}."
    return ApiError(400, message, code, param or None)


def _param(location: Sequence[int | str]) -> str:
    """`gate.rules[0].metric`, without what pydantic and FastAPI add to a location."""
    text, in_union = "", False
    for part in location:
        union = isinstance(part, str) and part.startswith("tagged-union[")
        if isinstance(part, int):
            text += f"[{part}]"
        # What follows a union is the tag of the member that was tried.
        elif not (in_union or union or _is_added(part, first=not text)):
            text += f".{part}" if text else part
        in_union = union
    return text


def _is_added(part: str, *, first: bool) -> bool:
    """The request's part that a field came from, or the name of a union's member."""
    if first and part in ("body", "query", "path", "header"):
        return True
    return part[:1].isupper() or part.startswith(("literal[", "function-"))


def _check_values(value: Any, path: str, depth: int) -> None:
    """Refuses deep nesting, and NUL characters, which PostgreSQL cannot store."""
    if depth > MAX_DEPTH:
        raise ApiError(400, f"The body is nested deeper than {MAX_DEPTH} levels.", "invalid_value")
    if isinstance(value, str) and "\0" in value:
        raise ApiError(
            400, f"'{path}' contains a NUL character. Remove it.", "invalid_value", path or None
        )
    if isinstance(value, dict):
        for key, item in value.items():
            _check_values(key, path, depth)
            _check_values(item, f"{path}.{key}" if path else key, depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_values(item, f"{path}[{index}]", depth + 1)
