"""Every query about files."""

from collections.abc import Sequence

from sqlalchemy import Select, or_, select
from sqlalchemy.orm import Session

from service.kit.clock import now
from service.store.models import File


class FileRepository:
    """Files that one organisation may see."""

    def __init__(self, session: Session, organization_id: str) -> None:
        self.session = session
        self.organization_id = organization_id

    def owned(self) -> Select[File]:
        """Files of the organisation, deleted ones too: a page may go on after one of those."""
        return select(File).where(File.organization_id == self.organization_id)

    def readable(self) -> Select[File]:
        """The one statement that says which files are visible."""
        return self.owned().where(
            File.deleted_at.is_(None),
            or_(File.expires_at.is_(None), File.expires_at > int(now())),
        )

    def filtered(self, purpose: str | None) -> Select[File]:
        statement = self.readable()
        return statement if purpose is None else statement.where(File.purpose == purpose)

    def get(self, file_id: str, *, lock: bool = False) -> File | None:
        """The file, or None. `lock` keeps it from being deleted until the transaction ends."""
        statement = self.readable().where(File.id == file_id)
        if lock:
            statement = statement.with_for_update().execution_options(populate_existing=True)
        return self.session.scalar(statement)

    def add(self, file: File) -> None:
        self.session.add(file)
        self.session.flush()


def expired(session: Session, limit: int = 100) -> Sequence[File]:
    """Files of all organisations whose time is over and whose content is still stored."""
    return session.scalars(
        select(File)
        .where(File.deleted_at.is_(None), File.expires_at <= int(now()))
        .order_by(File.sequence)
        .limit(limit)
        .with_for_update(skip_locked=True)
    ).all()
