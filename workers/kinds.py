"""What a worker does for each kind of job: one entry, and the supervisor needs to know no more.

A new kind is a handler here, words in service/fine_tuning/kinds.py, and a command of the pipeline.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy.orm import Session

from service.fine_tuning.attempts import JobError, Lease
from service.fine_tuning.kinds import ANALYSIS, FINE_TUNE, GATE_RUN
from service.fine_tuning.lifecycle import VALIDATING_FILES
from service.kit.artifacts import ArtifactStore
from service.settings import Settings
from service.store.database import SessionFactory
from service.store.models import Job
from workers import analyses, gate_runs, publish, workspace
from workers.outcome import ChildExit
from workers.workspace import CannotStart


class Publishing(Protocol):
    """What becomes of a complete result."""

    def publish(self, ended: ChildExit) -> str:
        """Store the result and finish the attempt and the job; returns how the attempt ended.

        Called again after a database error, also when the commit went through unseen.
        """


@dataclass(frozen=True)
class Kind:
    """How one kind of job is worked on.

    opening: what the log says when an attempt begins. read_plan: what the store says about an
    attempt, in one transaction. prepare: fills the work folder; returns (spec file, work folder).
    command: words of the pipeline's command before the spec file.
    """

    opening: Callable[[Job, int], Sequence[str]]
    read_plan: Callable[[Session, Lease], Any]
    prepare: Callable[[Settings, ArtifactStore, Lease, Any], tuple[Path, Path]]
    publisher: Callable[[Settings, SessionFactory, ArtifactStore, Lease], Publishing]
    command: Sequence[str] = ()


def kind_of(name: str) -> Kind:
    """The handler of a kind; one that this worker does not know fails its jobs with a reason."""
    return KINDS.get(name, _unknown(name))


def _fine_tuning_opening(job: Job, number: int) -> list[str]:
    if job.status != VALIDATING_FILES:
        return [f"Fine-tuning job continues (attempt {number})"]
    words = [f"Validating training file: {job.training_file_id}"]
    if job.validation_file_id is not None:
        words.append(f"Validating validation file: {job.validation_file_id}")
    return words


def _unknown(name: str) -> Kind:
    def refuse(session: Session, lease: Lease) -> Any:
        raise CannotStart(
            JobError(
                "internal_error",
                f"The worker that took this job does not know the kind {name}; it is older than "
                "the gateway. Update the workers and create the job again.",
            )
        )

    return Kind(lambda _job, _number: [], refuse, workspace.prepare, publish.Publisher)


KINDS: dict[str, Kind] = {
    FINE_TUNE: Kind(
        opening=_fine_tuning_opening,
        read_plan=workspace.read_plan,
        prepare=workspace.prepare,
        publisher=publish.Publisher,
    ),
    GATE_RUN: Kind(
        opening=gate_runs.opening,
        read_plan=gate_runs.read_plan,
        prepare=gate_runs.prepare,
        publisher=gate_runs.GateRunPublisher,
        command=("gate",),
    ),
    ANALYSIS: Kind(
        opening=analyses.opening,
        read_plan=analyses.read_plan,
        prepare=analyses.prepare,
        publisher=analyses.AnalysisPublisher,
        command=("analysis",),
    ),
}
