"""The states of a job: one table of transitions, asked by everybody who changes a job."""

from service.kit.clock import now
from service.store.models import Job

VALIDATING_FILES = "validating_files"
QUEUED = "queued"
RUNNING = "running"
PAUSED = "paused"
SUCCEEDED = "succeeded"
FAILED = "failed"
CANCELLED = "cancelled"

TERMINAL = frozenset({SUCCEEDED, FAILED, CANCELLED})
UNFINISHED = frozenset({VALIDATING_FILES, QUEUED, RUNNING, PAUSED})

# What a job fails with when its gate did not pass.
GATE_CODES = frozenset({"safety_gate_failed", "gate_inconclusive"})

TRANSITIONS: dict[str, frozenset[str]] = {
    VALIDATING_FILES: frozenset({QUEUED, FAILED, CANCELLED, PAUSED}),
    QUEUED: frozenset({RUNNING, CANCELLED, PAUSED, FAILED}),
    RUNNING: frozenset({SUCCEEDED, FAILED, CANCELLED, PAUSED, QUEUED}),
    PAUSED: frozenset({VALIDATING_FILES, QUEUED, CANCELLED}),
    SUCCEEDED: frozenset(),
    FAILED: frozenset(),
    CANCELLED: frozenset(),
}

STAGES: dict[str, frozenset[str | None]] = {
    VALIDATING_FILES: frozenset({"queued", "validating", "pausing", "cancelling"}),
    QUEUED: frozenset({"queued", "pausing", "cancelling"}),
    RUNNING: frozenset(
        {
            "validating",
            "tuning",
            "perturbing",
            "evaluating",
            "analyzing",
            "gating",
            "awaiting_approval",
            "publishing",
            "pausing",
            "cancelling",
        }
    ),
    PAUSED: frozenset({None}),
    SUCCEEDED: frozenset({None}),
    FAILED: frozenset({None}),
    CANCELLED: frozenset({None}),
}

_FIRST_STAGE: dict[str, str | None] = {
    VALIDATING_FILES: "queued",
    QUEUED: "queued",
    RUNNING: "tuning",
    PAUSED: None,
    SUCCEEDED: None,
    FAILED: None,
    CANCELLED: None,
}


class IllegalTransition(RuntimeError):
    """The job may not go from its status (or stage) to the one asked for."""


def move(job: Job, status: str, *, stage: str | None = None) -> None:
    """Give `job` a status and a stage; a terminal status also gets its finishing time.

    The same status is allowed (a change of stage), except for terminal ones. Without `stage` the
    status's first one is taken. Raises IllegalTransition and then changes nothing.
    """
    if status not in TRANSITIONS:
        raise IllegalTransition(f"no such status: {status}")
    stays = job.status == status and status not in TERMINAL
    if not stays and status not in TRANSITIONS[job.status]:
        raise IllegalTransition(f"job {job.id} is {job.status} and cannot become {status}")
    target = _FIRST_STAGE[status] if stage is None else stage
    if target not in STAGES[status]:
        raise IllegalTransition(f"job {job.id}: stage {target} does not belong to {status}")
    if (job.status, job.stage) != (status, target):
        job.progress = None
    job.status = status
    job.stage = target
    if status in TERMINAL:
        job.finished_at = int(now())


def overrule(job: Job) -> None:
    """The one way out of a terminal status: reviewers release what the gate had blocked, so the job
    has succeeded after all. Its finishing time stays. Raises IllegalTransition for any other job.
    """
    if not is_blocked(job):
        raise IllegalTransition(f"job {job.id} is {job.status} and was not blocked by the gate")
    job.status = SUCCEEDED
    job.error = None


def is_blocked(job: Job) -> bool:
    """Whether the job is finished but for its gate, which did not pass."""
    return job.status == FAILED and (job.error or {}).get("code") in GATE_CODES


def is_finished(job: Job) -> bool:
    """Whether nothing will change any more."""
    return job.status in TERMINAL


def can_cancel(job: Job) -> bool:
    return CANCELLED in TRANSITIONS[job.status]


def can_pause(job: Job) -> bool:
    """A waiting job shows validating_files until a worker takes it, so that may pause as well."""
    return PAUSED in TRANSITIONS[job.status] and not job.cancel_requested


def can_resume(job: Job) -> bool:
    return job.status == PAUSED
