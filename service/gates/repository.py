"""Every query about gate policies and overrides."""

from collections.abc import Sequence

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from service.store.models import GateOverride, GatePolicy, Organization


class PolicyRepository:
    """Policy versions of one organisation."""

    def __init__(self, session: Session, organization_id: str) -> None:
        self.session = session
        self.organization_id = organization_id

    def readable(self) -> Select[GatePolicy]:
        """The one statement that says which versions are visible."""
        return select(GatePolicy).where(GatePolicy.organization_id == self.organization_id)

    def get(self, policy_id: str) -> GatePolicy | None:
        return self.session.scalar(self.readable().where(GatePolicy.id == policy_id))

    def newest(self, *, lock: bool = False) -> GatePolicy | None:
        """The version in force, which may be a withdrawal; None: there never was one. `lock` holds
        the organisation's row, so that two writers cannot both follow on it."""
        if lock:
            self.session.execute(
                select(Organization.id)
                .where(Organization.id == self.organization_id)
                .with_for_update(key_share=True)
            )
        return self.session.scalar(self.readable().order_by(GatePolicy.version.desc()).limit(1))

    def add(self, row: GatePolicy) -> None:
        self.session.add(row)
        self.session.flush()


class OverrideRepository:
    """Overrides of one organisation's jobs."""

    def __init__(self, session: Session, organization_id: str) -> None:
        self.session = session
        self.organization_id = organization_id

    def of_job(self, job_id: str) -> Sequence[GateOverride]:
        """All overrides of a job, the oldest first."""
        return self.session.scalars(
            select(GateOverride)
            .where(
                GateOverride.organization_id == self.organization_id,
                GateOverride.job_id == job_id,
            )
            .order_by(GateOverride.sequence)
        ).all()

    def add(self, row: GateOverride) -> None:
        self.session.add(row)
        self.session.flush()
