"""The one error that endpoints raise, and its OpenAI error object."""

from collections.abc import Mapping, Sequence
from typing import Any

_TYPES = {429: "rate_limit_error"}


class ApiError(Exception):
    """An answer other than success.

    `message` says what was wrong, where, and what to do. `details` (up to 100 findings) becomes
    `error.errors`; `headers` are added to the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        type: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        details: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.type = type or _default_type(status)
        self.headers = dict(headers or {})
        self.details = None if details is None else [dict(item) for item in details]

    def body(self) -> dict[str, Any]:
        """The answer's JSON: all four keys of the error object are always there."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        if self.details is not None:
            error["errors"] = self.details
        return {"error": error}


def _default_type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return _TYPES.get(status, "invalid_request_error")


def invalid_value(message: str, param: str | None) -> ApiError:
    """400: a field that is there, with a value that is not allowed."""
    return ApiError(400, message, "invalid_value", param)
