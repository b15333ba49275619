"""How the pipeline says that a job cannot go on, in words for the person who sent it."""

from collections.abc import Sequence
from typing import Literal

FailureCode = Literal[
    "invalid_training_file",
    "invalid_validation_file",
    "invalid_n_examples",
    "context_length_exceeded",
    "model_unavailable",
    "out_of_memory",
    "storage_full",
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
