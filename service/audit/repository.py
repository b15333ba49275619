"""Every query about the audit log."""

from collections.abc import Iterator

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from service.store.models import AuditEntry, Organization

BATCH = 500


class AuditRepository:
    """Entries of one organisation."""

    def __init__(self, session: Session, organization_id: str) -> None:
        self.session = session
        self.organization_id = organization_id

    def readable(self, subject: str | None = None, action: str | None = None) -> Select[AuditEntry]:
        """Visible entries, of one subject or one kind of action where that is given."""
        statement = select(AuditEntry).where(AuditEntry.organization_id == self.organization_id)
        if subject is not None:
            statement = statement.where(AuditEntry.subject == subject)
        return statement if action is None else statement.where(AuditEntry.action == action)

    def newest(self) -> AuditEntry | None:
        """The last entry. The organisation's row is held until the transaction ends, so that two
        writers cannot both append to it."""
        # key_share: rows that name the organisation hold a share of its key, so two writers that
        # have each added one would wait for each other.
        self.session.execute(
            select(Organization.id)
            .where(Organization.id == self.organization_id)
            .with_for_update(key_share=True)
        )
        return self.session.scalar(self.readable().order_by(AuditEntry.number.desc()).limit(1))

    def chain(self) -> Iterator[AuditEntry]:
        """All entries by their number, read in batches."""
        last = -1
        while True:
            statement = self.readable().where(AuditEntry.number > last)
            batch = self.session.scalars(statement.order_by(AuditEntry.number).limit(BATCH)).all()
            if not batch:
                return
            for entry in batch:
                last = entry.number
                yield entry
                self.session.expunge(entry)

    def add(self, entry: AuditEntry) -> None:
        self.session.add(entry)
        self.session.flush()
