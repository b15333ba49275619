"""How the pipeline says that a job cannot go on, in words for the person who sent it."""

import errno
from collections.abc import Sequence
from typing import Literal

FailureCode = Literal[
    "invalid_spec",
    "invalid_training_file",
    "invalid_validation_file",
    "invalid_n_examples",
    "context_length_exceeded",
    "model_unavailable",
    "out_of_memory",
    "storage_full",
    "invalid_analysis",
    "analysis_unavailable",
    "internal_error",
]


class PipelineFailure(Exception):
    """A job's end with a reason. `retryable`: another attempt may succeed with the same data."""

    def __init__(
        self,
        code: FailureCode,
        message: str,
        *,
        param: str | None = None,
        retryable: bool = False,
        details: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retryable = retryable
        self.details = list(details)


class Stopped(Exception):
    """SIGTERM arrived: the attempt ends here and its last checkpoint is complete."""


def is_storage_full(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, means that a disk has no room left.

    safetensors raises an exception of its own, with the system's number in its text only.
    """
    while error is not None:
        number = getattr(error, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT) or f"os error {errno.ENOSPC}" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a device or this machine had no memory left for a tensor."""
    return type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
