"""Queries about organisations and their API keys."""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.store.models import ApiKey, Organization


def organization_by_name(session: Session, name: str) -> Organization | None:
    return session.scalar(select(Organization).where(Organization.name == name))


def key_by_digest(session: Session, digest: str) -> tuple[ApiKey, Organization] | None:
    """The key with this HMAC and its organisation, revoked or not."""
    row = session.execute(
        select(ApiKey, Organization)
        .join(Organization, Organization.id == ApiKey.organization_id)
        .where(ApiKey.digest == digest)
    ).first()
    return None if row is None else (row[0], row[1])


def keys(session: Session, organization: str | None) -> Sequence[tuple[ApiKey, Organization]]:
    """All keys, or those of the organisation with this name, oldest first."""
    statement = select(ApiKey, Organization).join(
        Organization, Organization.id == ApiKey.organization_id
    )
    if organization is not None:
        statement = statement.where(Organization.name == organization)
    rows = session.execute(statement.order_by(ApiKey.created_at, ApiKey.id))
    return [(key, owner) for key, owner in rows]
