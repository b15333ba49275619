"""What the end of a training process means for its attempt and its job."""

import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from service.fine_tuning.attempts import JobError
from workers.child import Message


class Ask(StrEnum):
    """Why the supervisor told the process to leave."""

    CANCEL = "cancel"
    PAUSE = "pause"
    SHUTDOWN = "shutdown"
    TIME_LIMIT = "time_limit"
    FENCED = "fenced"


@dataclass(frozen=True)
class ChildExit:
    """Everything known about a process that has ended."""

    exit_code: int
    log_tail: str
    result: Message | None = None
    failure: Message | None = None
    asked: Ask | None = None
    out_of_memory: bool = False
    time_limit_seconds: float = 0.0


Kind = Literal["publish", "failed", "retry", "cancelled", "paused", "released", "fenced"]


@dataclass(frozen=True)
class Ending:
    """What to do now. `error` is set for failed, and for retry (what the last try fails with)."""

    kind: Kind
    label: str
    error: JobError | None = None


FAILURE_CODES = frozenset(
    {
        "invalid_training_file",
        "invalid_validation_file",
        "invalid_n_examples",
        "context_length_exceeded",
        "model_unavailable",
        "out_of_memory",
        "storage_full",
        "invalid_spec",
        "invalid_analysis",
        "analysis_unavailable",
        "internal_error",
    }
)

OUT_OF_MEMORY = JobError(
    "out_of_memory",
    "The job needed more memory than its worker has. Use a smaller batch_size or shorter rows, or "
    "give the worker more memory, and create the job again.",
)
STORAGE_FULL = JobError(
    "storage_full", "The artifact store is full; free space and create the job again."
)
_PARAMS = ("training_file", "validation_file")
# Codes whose field is one of a request, whichever that is.
_FREE_PARAMS = ("invalid_spec", "invalid_analysis")
_WHERE = "The operator can read its last lines with `tunegate jobs log`."
_FAULTS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


def classify(ended: ChildExit) -> Ending:
    """The one place that decides.

    A cancel wins over everything that is not stored yet; a complete result wins over a wish to
    pause or to stop, since it is there; a failure that repeats itself ends the job whatever else
    was asked.
    """
    if ended.asked is Ask.FENCED:
        return Ending("fenced", "fenced")
    if ended.asked is Ask.CANCEL:
        return Ending("cancelled", "cancelled")
    if ended.result is not None:
        return Ending("publish", "result")
    if ended.failure is not None and not ended.failure.get("retryable", False):
        error = _reported(ended.failure)
        return Ending("failed", error.code, error)
    if ended.asked is Ask.TIME_LIMIT:
        return Ending("failed", "time_limit_exceeded", _time_limit(ended.time_limit_seconds))
    if ended.asked is Ask.PAUSE:
        return Ending("paused", "paused")
    if ended.asked is Ask.SHUTDOWN:
        return Ending("released", "shutdown")
    error = _reported(ended.failure) if ended.failure is not None else _crash(ended)
    return Ending("retry", error.code, error)


def _reported(failure: Message) -> JobError:
    code = failure.get("code")
    param = failure.get("param")
    details: Any = failure.get("details")
    return JobError(
        code if code in FAILURE_CODES else "internal_error",
        str(failure.get("message") or "The training process gave no reason."),
        param if param in _PARAMS or code in _FREE_PARAMS else None,
        tuple(_finding(item) for item in details[:100]) if isinstance(details, list) else (),
    )


def _finding(item: Any) -> dict[str, Any]:
    """One entry of the job's `error.errors`: an object, as when a file is refused at creation."""
    return item if isinstance(item, dict) else {"message": str(item)}


def _time_limit(seconds: float) -> JobError:
    return JobError(
        "time_limit_exceeded",
        f"The job ran longer than the {seconds:.0f} seconds that this service allows. Use fewer "
        "epochs or a smaller file, or ask the operator to raise the limit.",
    )


def _crash(ended: ChildExit) -> JobError:
    code = ended.exit_code
    if ended.out_of_memory:
        return OUT_OF_MEMORY
    if "No space left on device" in ended.log_tail:
        return JobError(
            "storage_full", "The worker's disk is full; free space and create the job again."
        )
    if code < 0:
        number = -code
        name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
        if number in _FAULTS:
            return JobError(
                "internal_error",
                f"The training process crashed ({name}, signal {number}). {_WHERE}",
            )
        return JobError(
            "worker_lost",
            f"The training process was ended from outside ({name}, signal {number}).",
        )
    if code == 0:
        return JobError("internal_error", "The training process ended without giving a result.")
    return JobError(
        "internal_error",
        f"The training process ended with exit code {code}. {_WHERE}",
    )
