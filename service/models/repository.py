"""Every query about released models."""

from collections.abc import Sequence

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from service.store.models import ReleasedModel


class ModelRepository:
    """Released models that one organisation may see. A quarantined model has no row at all."""

    def __init__(self, session: Session, organization_id: str) -> None:
        self.session = session
        self.organization_id = organization_id

    def readable(self) -> Select[ReleasedModel]:
        """The one statement that says which models are visible."""
        return select(ReleasedModel).where(
            ReleasedModel.organization_id == self.organization_id,
            ReleasedModel.deleted_at.is_(None),
        )

    def all(self) -> Sequence[ReleasedModel]:
        return self.session.scalars(
            self.readable().order_by(ReleasedModel.created_at, ReleasedModel.id)
        ).all()

    def get(self, name: str, *, lock: bool = False) -> ReleasedModel | None:
        statement = self.readable().where(ReleasedModel.id == name)
        return self.session.scalar(statement.with_for_update() if lock else statement)
