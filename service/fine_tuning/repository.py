"""Every query about jobs, their events, metrics and checkpoints."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Select, exists, func, or_, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from service.fine_tuning.kinds import ANALYSIS, FINE_TUNE
from service.fine_tuning.lifecycle import UNFINISHED
from service.kit.clock import now
from service.kit.ids import new_id
from service.store.models import Attempt, Checkpoint, Event, Job, JobLabel, Metric, Outbox

CHECKPOINTS = "checkpoints"


class JobRepository:
    """Jobs of one kind that one organisation may see; None: of all organisations (workers, reaper,
    command line)."""

    def __init__(
        self, session: Session, organization_id: str | None, kind: str = FINE_TUNE
    ) -> None:
        self.session = session
        self.organization_id = organization_id
        self.kind = kind

    def readable(self) -> Select[Job]:
        """The one statement that says which jobs are visible."""
        statement = select(Job).where(Job.kind == self.kind)
        if self.organization_id is not None:
            statement = statement.where(Job.organization_id == self.organization_id)
        return statement

    def get(self, job_id: str, *, lock: bool = False) -> Job | None:
        """The job, or None. `lock` holds its row until the transaction ends (PostgreSQL)."""
        statement = self.readable().where(Job.id == job_id)
        if lock:
            statement = statement.with_for_update().execution_options(populate_existing=True)
        return self.session.scalar(statement)

    def filtered(
        self, labels: Mapping[str, str] | None = None, *, unlabelled: bool = False
    ) -> Select[Job]:
        """Visible jobs that carry every pair of `labels`, or (unlabelled) no metadata at all."""
        statement = self.readable()
        for key, value in (labels or {}).items():
            statement = statement.where(
                exists().where(
                    JobLabel.job_id == Job.id, JobLabel.key == key, JobLabel.value == value
                )
            )
        if unlabelled:
            statement = statement.where(~exists().where(JobLabel.job_id == Job.id))
        return statement

    def add(self, job: Job) -> None:
        """Store a new job with its labels, first attempt and wake-up."""
        self.session.add(job)
        self.session.flush()
        for key, value in (job.labels or {}).items():
            self.session.add(JobLabel(job_id=job.id, key=key, value=value))
        add_attempt(self.session, job)

    def recent(
        self, api_key_id: str, since: float, *, key: str | None = None, digest: str | None = None
    ) -> Job | None:
        """The newest job that this API key made since `since` with this Idempotency-Key, or from
        this very request body (then only one that has not finished)."""
        statement = self.readable().where(
            Job.api_key_id == api_key_id, Job.created_at >= int(since)
        )
        if key is not None:
            statement = statement.where(Job.idempotency_key == key)
        if digest is not None:
            statement = statement.where(Job.request_digest == digest, Job.status.in_(UNFINISHED))
        return self.session.scalar(statement.order_by(Job.sequence.desc()).limit(1))

    def uses_file(self, file_id: str) -> bool:
        """Whether an unfinished job, of whatever kind, still needs the file."""
        return file_id in self._analysed_files() or bool(
            self.session.scalar(
                select(
                    exists().where(
                        Job.status.in_(UNFINISHED),
                        or_(Job.training_file_id == file_id, Job.validation_file_id == file_id),
                    )
                )
            )
        )

    def _analysed_files(self) -> set[str]:
        """Files that unfinished analyses read; there are few of those at a time."""
        statement = select(Job.request).where(Job.kind == ANALYSIS, Job.status.in_(UNFINISHED))
        if self.organization_id is not None:
            statement = statement.where(Job.organization_id == self.organization_id)
        named = ((request or {}).get("files", {}) for request in self.session.scalars(statement))
        return {file_id for files in named for file_id in files.values()}

    def queue_positions(self, jobs: Sequence[Job]) -> dict[str, int]:
        """By job id, how many attempts (over all tenants) wait before this job's; only waiting
        jobs are in it."""
        place = func.row_number().over(order_by=(Attempt.available_at, Attempt.id))
        waiting = (
            select(Attempt.job_id, (place - 1).label("before"))
            .where(Attempt.state == "queued")
            .subquery()
        )
        rows = self.session.execute(
            select(waiting.c.job_id, waiting.c.before).where(
                waiting.c.job_id.in_([job.id for job in jobs])
            )
        )
        return {row.job_id: row.before for row in rows}

    def start_times(self, jobs: Sequence[Job]) -> dict[str, float]:
        """By job id, when the current attempt was started; only started ones are in it."""
        rows = self.session.execute(
            select(Attempt.job_id, Attempt.started_at)
            .join(Job, (Job.id == Attempt.job_id) & (Job.attempt == Attempt.number))
            .where(Job.id.in_([job.id for job in jobs]), Attempt.started_at.is_not(None))
        )
        return {row.job_id: row.started_at for row in rows}

    def events(self, job_id: str) -> Select[Event]:
        """Events of a job that the caller has already been allowed to see."""
        return select(Event).where(Event.job_id == job_id)

    def checkpoints(self, job_id: str) -> Select[Checkpoint]:
        """Checkpoints of a job that the caller has already been allowed to see."""
        return select(Checkpoint).where(Checkpoint.job_id == job_id)

    def metrics(self, job_id: str) -> Sequence[Metric]:
        """All measured steps of a job, in order."""
        return self.session.scalars(
            select(Metric).where(Metric.job_id == job_id).order_by(Metric.step)
        ).all()


def checkpoints_of(job_id: str) -> str:
    """The folder of the artifact store with all checkpoints of a job."""
    return f"{CHECKPOINTS}/{job_id}"


def add_attempt(session: Session, job: Job) -> Attempt:
    """Queue the attempt that `job.attempt` names, with its wake-up for the dispatcher."""
    moment = now()
    attempt = Attempt(
        job_id=job.id,
        number=job.attempt,
        state="queued",
        available_at=moment,
        created_at=moment,
    )
    session.add(attempt)
    session.add(Outbox(job_id=job.id, attempt=job.attempt, created_at=moment))
    session.flush()
    return attempt


def append_event(
    session: Session,
    job_id: str,
    level: str,
    message: str,
    type: str = "message",
    data: Mapping[str, Any] | None = None,
) -> Event:
    """Add one event to a job's log.

    The job's row is locked first: on PostgreSQL two writers could otherwise commit their
    sequence numbers in the wrong order, and a reader's cursor would skip the later commit.
    """
    session.execute(select(Job.id).where(Job.id == job_id).with_for_update())
    event = Event(
        id=new_id("ftevent"),
        job_id=job_id,
        created_at=int(now()),
        level=level,
        type=type,
        message=message,
        data=None if data is None else dict(data),
    )
    session.add(event)
    session.flush()
    return event


def upsert_metrics(session: Session, job_id: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Store measurements, one mapping with a `step` each; a step that is there is overwritten."""
    # A statement may not touch the same row twice, so the last of a repeated step wins here.
    by_step = {int(row["step"]): dict(row) for row in rows}
    if not by_step:
        return
    values = [{"job_id": job_id, "step": step, "data": data} for step, data in by_step.items()]
    if session.get_bind().dialect.name == "postgresql":
        insert = postgresql.insert(Metric).values(values)
        session.execute(
            insert.on_conflict_do_update(
                index_elements=["job_id", "step"], set_={"data": insert.excluded.data}
            )
        )
    else:
        statement = sqlite.insert(Metric).values(values)
        session.execute(
            statement.on_conflict_do_update(
                index_elements=["job_id", "step"], set_={"data": statement.excluded.data}
            )
        )


def add_checkpoint(
    session: Session,
    job_id: str,
    *,
    name: str,
    step_number: int,
    metrics: Mapping[str, Any],
    location: str,
) -> Checkpoint:
    """Record a complete checkpoint. A resumed attempt that reaches the same step again keeps the
    row, its id and its name, and replaces metrics and location."""
    found = session.scalar(
        select(Checkpoint).where(Checkpoint.job_id == job_id, Checkpoint.step_number == step_number)
    )
    if found is not None:
        found.metrics = dict(metrics)
        found.location = location
        session.flush()
        return found
    checkpoint = Checkpoint(
        id=new_id("ftckpt"),
        job_id=job_id,
        name=name,
        step_number=step_number,
        metrics=dict(metrics),
        location=location,
        created_at=int(now()),
    )
    session.add(checkpoint)
    session.flush()
    return checkpoint
